"""The table of a profile."""

from __future__ import annotations

from pytest_modelprobe.record import LayerProfile, Profile


def test_a_profile_is_printed_as_a_table() -> None:
    root = LayerProfile(type="Net", calls=2, wall_time=0.004, flops=9000, activation_bytes=64, parameters=1234)
    fc = LayerProfile(type="Linear", calls=2, wall_time=0.001, flops=9000, activation_bytes=64, parameters=1234)
    profile = Profile(
        layers={"(root)": root, "fc": fc},
        forwards=2,
        wall_time=0.004,
        flops=9000,
        activation_bytes=64,
        parameters=1234,
        probe_time=0.25,
    )
    assert str(profile) == (
        "2 forwards: 9,000 FLOPs, 64 bytes of activations, 4.000 ms; the probe took 250.000 ms more\n"
        "\n"
        "layer    type     calls   parameters   activations   FLOPs      ms   time\n"
        "(root)   Net          2        1,234            64   9,000   4.000   100%\n"
        "fc       Linear       2        1,234            64   9,000   1.000    25%"
    )


def test_hostile_names_are_text() -> None:
    assert "\x1b" not in str(Profile(layers={"a\x1b[31m": LayerProfile(type="\x1b[31m")}))
