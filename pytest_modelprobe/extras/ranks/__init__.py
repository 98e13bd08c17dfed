"""Tests in several processes, the ranks of one run, and the records of all ranks as one."""
