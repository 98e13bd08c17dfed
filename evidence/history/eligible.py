"""Of which models no test should fail while the function is the same, decided without the tool.

The rule that a default comparison keeps is written here once more: a model is *eligible* if both versions have the same
checkpoint, trainable parameters, inputs and outputs, attributes and mode layers, as `facts.py` finds them in plain
torch. `python evidence/history --eligible` writes the list of all pairs, before anything is compared by the tool.
"""

from __future__ import annotations

from typing import Any

Facts = dict[str, Any]


def differing(old: Facts, new: Facts) -> dict[str, str]:
    """Return what makes a model not eligible, each with the first place; none if it is eligible."""
    found: dict[str, str] = {}
    for name in ("checkpoint", "tied", "trainable", "inputs", "outputs"):
        then, now = old[name], new[name]
        keys = then.keys() & now.keys() if name in ("tied", "trainable") else {**then, **now}
        for key in (key for key in then | now if key in keys and then.get(key) != now.get(key)):
            found.setdefault(name, f"{key}: {then.get(key, 'none')} → {now.get(key, 'none')}")
    then, now = ([name for name in side["order"] if name in other["order"]] for side, other in ((old, new), (new, old)))
    if then != now:
        found["order"] = next(f"{a} → {b}" for a, b in zip(then, now, strict=True) if a != b)
    for name, then in old["attributes"].items():
        now = new["attributes"].get(name, {})
        for key in sorted(_differing(then, now)):
            found.setdefault("attributes", f"{name}.{key}: {then[key]} → {now[key]}")
    text = _of_modes(old["mode layers"], new["mode layers"])
    return {**found, "mode layers": text} if text else found


def same(x: Any, y: Any) -> bool:
    return bool(x == y or (x != x and y != y))


def _of_modes(old: Facts, new: Facts) -> str:
    """Return which mode layers came, went or changed their class. A new name alone is none of these."""
    for name in sorted(old.keys() & new.keys()):
        if old[name][0] != new[name][0]:
            return f"{name}: {old[name][0]} → {new[name][0]}"
    came = [new[name] for name in new if name not in old]
    went = []
    for kind, attributes in (old[name] for name in old if name not in new):
        again = next((one for one in came if one[0] == kind and not _differing(attributes, one[1])), None)
        if again is None:
            went.append(kind)
        else:
            came.remove(again)
    return ", ".join([*(f"{kind} went" for kind in went), *(f"{kind} came" for kind, _ in came)])[:300]


def _differing(old: Facts, new: Facts) -> list[str]:
    """Return the attributes that both have and that are not the same."""
    return [key for key in old.keys() & new.keys() if not same(old[key], new[key])]
