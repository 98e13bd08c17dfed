"""`Record.save` and `Record.load`: a record in another process."""

import gzip
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, Record, UsageError, assert_same_behavior


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x):
        return {"logits": self.head(self.norm(self.fc(x)).relu())}


def record_of(change=lambda model: None, **options):
    with ModelProbe() as probe:
        model = probe.build(Net)
        change(model)
        return probe.run(model, probe.randn(4, 8), loss="random", **options)


@pytest.mark.parametrize("name", ["net.json.gz", "folder/that/is/made/net.json"])
def test_a_loaded_record_equals_the_saved_one(name, tmp_path):
    record = record_of(histograms=True, profile=True)
    record.save(tmp_path / name)
    loaded = Record.load(str(tmp_path / name))
    assert loaded == record
    assert loaded.to_dict() == record.to_dict()
    assert str(loaded) == str(record)


def test_the_record_of_a_step_with_its_optimizer_is_saved(tmp_path):
    with ModelProbe() as probe:
        model = probe.build(Net)
        watch = probe.watch(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(probe.randn(4, 8))["logits"].sum().backward()
        optimizer.step()
    watch.first_step.save(tmp_path / "step.json")
    assert Record.load(tmp_path / "step.json") == watch.first_step


def test_a_loaded_record_compares_as_the_saved_one(tmp_path):
    record_of().save(tmp_path / "net.json")
    expected = Record.load(tmp_path / "net.json")
    assert_same_behavior(record_of(), expected)
    with pytest.raises(AssertionError, match=r"^norm\.eps 1e-05 → 0\.1"):
        assert_same_behavior(record_of(lambda model: setattr(model.norm, "eps", 0.1)), expected)


def test_the_record_of_another_process_needs_no_torch_to_be_loaded(tmp_path):
    record_of().save(tmp_path / "net.json")
    code = (
        "import sys; from pytest_modelprobe.record import Record; "
        "print(Record.load(sys.argv[1])['fc'].output.shape, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "net.json"], capture_output=True, text=True)
    assert done.stdout == "(4, 16) False\n", done.stderr


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.json"
    Record(model="Old").save(path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match=r"net\.json cannot be written \(No space left on device\)"):
        Record(model="New").save(path)
    assert Record.load(path).model == "Old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_read_back_has_to_be_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "net.json"
    Record(model="Old").save(path)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", lambda path: b"{}")
        with pytest.raises(UsageError, match="the disk returns other bytes than it was given"):
            Record(model="New").save(path)
    assert Record.load(path).model == "Old"


def test_equal_records_make_equal_files(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        record_of().save(tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_the_file_is_strict_json(tmp_path):
    record_of(lambda model: nn.init.constant_(model.fc.bias, float("inf"))).save(tmp_path / "net.json.gz")
    text = gzip.decompress((tmp_path / "net.json.gz").read_bytes())
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["schema"] == 2


WHOLE = json.dumps(Record(model="Net", forwards=1).to_dict())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[:-5], r"is no record, or is cut short \(39 bytes\): copy it again, or save the record again"),
        (
            '{"schema": 3, "model": "Net"}',
            r"is no record .* \(not a record of schema 2: found 3\): give .*, upgrade",
        ),
        ('{"schema": 2}', r"is no record that this version reads \(not a record: .*model"),
        ('{"schema": 2, "model": "Net", "mood": 3}', r"is no record .* \(Record has no field 'mood'\): give"),
    ],
)
def test_a_file_that_is_no_record_is_told(content, message, tmp_path):
    path = tmp_path / "net.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"^{path} {message}"):
        Record.load(path)


def test_a_compressed_file_that_is_cut_short_is_told(tmp_path):
    path = tmp_path / "net.json.gz"
    record_of().save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="is no record, or is cut short"):
        Record.load(path)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    with pytest.raises(UsageError, match=r"^there is no record .*net\.json: write it with record\.save\(path\)$"):
        Record.load(tmp_path / "net.json")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\): give a file that record\.save wrote$"):
        Record.load(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\)"):
        Record(model="Net").save(tmp_path)
