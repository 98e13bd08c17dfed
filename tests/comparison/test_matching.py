"""Which layer of one record is which of another."""

from __future__ import annotations

import pytest
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison.matching import match
from pytest_modelprobe.exceptions import SelectionError
from pytest_modelprobe.record import Call, EmittedTensor, IsolatedResponse, Layer, Parameter, Record, Value
from pytest_modelprobe.record.renames import applicable_rename, infer_rename, renamed, resolve_rename


def record(**types: str) -> Record:
    """Return a record of layers by their types; ``__`` in a name stands for a dot."""
    names = {name.replace("__", "."): type_ for name, type_ in types.items()}
    return Record(model="Net", layers={name: Layer(name=name, type=type_) for name, type_ in names.items()})


def numbered(*types: str) -> Record:
    """Return a record of the layers 0, 1, 2... of these types."""
    return Record(model="Net", layers={str(i): Layer(name=str(i), type=t) for i, t in enumerate(types)})


def structure(model: nn.Module) -> Record:
    return ModelProbe().architecture(model)


# --- by name ------------------------------------------------------------------------------------------------------


def test_a_layer_of_another_type_is_still_the_one_of_its_name() -> None:
    assert match(record(act="GELU"), record(act="ReLU")) == {"act": "act"}


# --- by what it is made of ----------------------------------------------------------------------------------------


def test_a_renamed_layer_is_found_by_its_type() -> None:
    assert match(record(head="Linear", act="ReLU"), record(fc="Linear", act="ReLU")) == {"act": "act", "fc": "head"}


def test_a_renamed_layer_is_not_found_among_others_of_another_shape() -> None:
    old = structure(nn.ModuleDict({"fc": nn.Linear(2, 3)}))
    assert match(structure(nn.ModuleDict({"head": nn.Linear(2, 4)})), old) == {"(root)": "(root)"}


def test_a_renamed_container_takes_all_inside_it_along() -> None:
    old = structure(nn.ModuleDict({"h": nn.Sequential(nn.Linear(2, 3), nn.ReLU())}))
    new = structure(nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 3), nn.ReLU())}))
    assert match(new, old) == {"(root)": "(root)", "h": "blocks", "h.0": "blocks.0", "h.1": "blocks.1"}


def test_layers_renamed_that_are_made_alike_keep_their_order() -> None:
    old, new = record(q="Linear", k="Linear", v="Linear"), record(query="Linear", key="Linear", value="Linear")
    assert match(new, old) == {"q": "query", "k": "key", "v": "value"}


def test_layers_made_alike_that_have_another_order_by_their_names_are_not_paired() -> None:
    old, new = record(query="Linear", key="Linear"), record(k_proj="Linear", q_proj="Linear")
    assert match(new, old) == {}


def test_layers_made_alike_that_are_called_in_another_order_are_not_paired() -> None:
    def two(first: str, second: str, *, starts: tuple[int, int]) -> Record:
        calls = [(Call(root="(root)", root_training=False, index=0, started=at),) for at in starts]
        layers = (Layer(name=n, type="Linear", calls=c) for n, c in zip((first, second), calls, strict=True))
        return Record(model="Net", layers={layer.name: layer for layer in layers})

    old = two("a", "b", starts=(0, 1))
    assert match(two("x", "y", starts=(0, 1)), old) == {"a": "x", "b": "y"}
    assert match(two("x", "y", starts=(1, 0)), old) == {}


def test_of_two_made_alike_that_went_none_is_the_one_that_came() -> None:
    assert match(record(c="Linear"), record(a="Linear", b="Linear")) == {}


def test_a_layer_without_parameters_that_moved_to_another_container_is_another() -> None:
    assert match(record(a="Block", a__fc="Linear", b="Block"), record(a="Block", b="Block", b__fc="Linear")) == {
        "a": "a",
        "b": "b",
    }


def test_a_layer_that_took_the_name_of_a_removed_one_is_paired_by_that_name() -> None:
    old, new = record(act="ReLU", norm="LayerNorm"), record(act="LayerNorm")
    assert match(new, old) == {"act": "act"}


def test_layers_inside_containers_that_were_not_recorded_are_matched_too() -> None:
    assert match(record(a__b__fc="Linear"), record(a__b__fc="Linear")) == {"a.b.fc": "a.b.fc"}


# --- in other containers ------------------------------------------------------------------------------------------


def made(**types: str | tuple[str, int]) -> Record:
    """Return a record of layers by type, or by type and the size of a weight; ``__`` stands for a dot."""
    layers = []
    for name, given in types.items():
        kind, *sizes = (given,) if isinstance(given, str) else given
        weights = tuple(Parameter(name="weight", shape=(n,), dtype="float32", device="cpu") for n in sizes)
        layers.append(Layer(name=name.replace("__", ".").strip("_"), type=kind, parameters=weights))
    return Record(model="Net", layers={layer.name: layer for layer in layers})


def blocks(container: str, *own: str, types: str = "Linear") -> dict[str, str | tuple[str, int]]:
    found: dict[str, str | tuple[str, int]] = {container: "ModuleList"}
    for i in range(3):
        found[f"{container}__{i}"] = "Block"
        found |= {f"{container}__{i}__{name}": (types, 4) for name in own}
    return found


def test_blocks_that_moved_out_of_a_container_are_found_with_all_inside_them() -> None:
    old = made(encoder="Encoder", **blocks("encoder__layer", "fc"), head=("Linear", 9))
    new = made(**blocks("layers", "fc"), head=("Linear", 9))
    found = match(new, old)
    assert found["encoder.layer.2.fc"] == "layers.2.fc"
    assert "encoder" not in found
    moved = {before: after for before, after in found.items() if before != after}
    assert infer_rename(new, old, moved) == {"layers": "encoder.layer"}


def test_layers_of_blocks_whose_containers_changed_are_found_by_their_numbers_and_order() -> None:
    old = made(**blocks("layer", "attention__query", "attention__key", "attention__dense"))
    new = made(**blocks("layer", "q_proj", "k_proj", "o_proj"))
    found = match(new, old)
    assert found["layer.1.attention.key"] == "layer.1.k_proj"
    moved = {before: after for before, after in found.items() if before != after}
    assert infer_rename(new, old, moved) == {
        "layer.*.q_proj": "layer.*.attention.query",
        "layer.*.k_proj": "layer.*.attention.key",
        "layer.*.o_proj": "layer.*.attention.dense",
    }


@pytest.mark.parametrize("wrapped_now", [True, False])
def test_a_layer_is_found_inside_what_has_its_name_now_and_the_reverse(wrapped_now: bool) -> None:
    plain = made(head=("Linear", 4))
    wrapped = made(head="ClassifierHead", head__pool="Pool", head__fc=("Linear", 4))
    if wrapped_now:
        assert match(wrapped, plain) == {"head": "head.fc"}
        assert infer_rename(wrapped, plain, {"head": "head.fc"}) == {"head.fc": "head"}
    else:
        assert match(plain, wrapped) == {"head.fc": "head"}


def test_a_layer_is_not_found_where_two_inside_are_made_like_it() -> None:
    new = made(head="Head", head__a=("Linear", 4), head__b=("Linear", 4))
    assert match(new, made(head=("Linear", 4))) == {"head": "head"}


def test_a_single_layer_elsewhere_with_nothing_in_its_name_is_another() -> None:
    found = match(made(a="A", b="B", b__out=("Linear", 4)), made(a="A", a__fc=("Linear", 4), b="B"))
    assert found == {"a": "a", "b": "b"}


def test_a_single_layer_that_kept_its_name_elsewhere_is_found() -> None:
    found = match(made(enc="E", norm=("Norm", 4)), made(enc="E", enc__norm=("Norm", 4)))
    assert found["enc.norm"] == "norm"


def test_what_the_rules_say_is_what_was_found() -> None:
    old = made(encoder="Encoder", **blocks("encoder__layer", "attn__query", "attn__key"))
    new = made(**blocks("layers", "attn__query", "attn__key"))
    found = match(new, old)
    assert resolve_rename(new, old, {"layers": "encoder.layer"}).items() <= found.items()


def test_what_is_said_once_has_its_number_and_what_no_rule_says_has_none() -> None:
    old = made(h__0=("Linear", 4), h__1=("Linear", 5))
    new = made(b__0=("Linear", 4), b__1=("Linear", 5))
    assert infer_rename(new, old, {"h.0": "b.0"}) == {"b.0": "h.0"}
    assert infer_rename(new, old, {"h.0": "b.1", "h.1": "b.0"}) == {"b.1": "h.0", "b.0": "h.1"}
    assert infer_rename(new, old, {"x": "y"}) == {}


def test_a_record_with_the_new_names_needs_no_rename() -> None:
    assert applicable_rename({"b": "a"}, made(b="B")) == {}
    assert applicable_rename({"b": "a"}, made(a="B")) == {"b": "a"}
    assert applicable_rename({"x": "y"}, made(b="B")) == {"x": "y"}


# --- numbered children --------------------------------------------------------------------------------------------


def test_a_block_added_to_blocks_of_one_type_is_the_last() -> None:
    assert match(numbered("Block", "Block", "Block"), numbered("Block", "Block")) == {"0": "0", "1": "1"}


def test_a_layer_inserted_into_a_sequential_moves_those_after_it() -> None:
    old, new = numbered("Linear", "ReLU", "Linear"), numbered("Linear", "LayerNorm", "ReLU", "Linear")
    assert match(new, old) == {"0": "0", "1": "2", "2": "3"}


def test_many_layers_are_aligned_at_both_ends() -> None:
    middle = ["Conv", "Norm"] * 1000
    old, new = numbered("Linear", *middle, "Head"), numbered("Linear", "Pool", *middle, "Head")
    found = match(new, old)
    assert (found["0"], found["1"], found["2001"]) == ("0", "2", "2002")


def test_children_that_are_not_all_numbered_are_matched_by_name() -> None:
    old, new = record(fc="Linear", act="ReLU"), record(fc="ReLU", act="Linear", other="Tanh")
    assert match(new, old) == {"fc": "fc", "act": "act"}


# --- what the user says -------------------------------------------------------------------------------------------


def test_a_name_without_wildcards_takes_all_inside_it_along() -> None:
    new, old = record(proj="Block", proj__fc="Linear"), record(head="Block", head__fc="Linear")
    assert resolve_rename(new, old, {"proj": "head"}) == {"head": "proj", "head.fc": "proj.fc"}


def test_one_star_stands_for_one_segment() -> None:
    new, old = record(b__0__fc="Linear", b__x__y__fc="Linear"), record(h__0__fc="Linear", h__x__y__fc="Linear")
    assert resolve_rename(new, old, {"b.*.fc": "h.*.fc"}) == {"h.0.fc": "b.0.fc"}


def test_two_stars_stand_for_any_number_of_segments() -> None:
    new, old = record(b__fc="Linear", b__x__y__fc="Linear"), record(h__fc="Linear", h__x__y__fc="Linear")
    assert resolve_rename(new, old, {"b.**": "h.**"}) == {"h.fc": "b.fc", "h.x.y.fc": "b.x.y.fc"}


def test_of_two_renames_that_say_something_of_one_layer_the_last_counts() -> None:
    new, old = record(b__0="Linear", b__1="Linear"), record(h__0="Linear", h__1="Linear")
    assert resolve_rename(new, old, {"b.*": "h.*", "b.1": "h.0"}) == {"h.0": "b.1"}


def test_layers_of_the_glob_that_the_expected_has_not_are_left_out() -> None:
    new, old = record(b__0="Linear", b__1="Linear"), record(h__0="Linear")
    assert resolve_rename(new, old, {"b.*": "h.*"}) == {"h.0": "b.0"}


def test_a_rename_that_matches_nothing_of_the_actual_says_so() -> None:
    with pytest.raises(SelectionError) as error:
        resolve_rename(record(fc="Linear"), record(fc="Linear"), {"blocks.*": "h.*"})
    assert str(error.value) == "rename: 'blocks.*' matches no layer of the actual Net"


def test_a_rename_that_matches_nothing_of_the_expected_says_what_it_looked_for() -> None:
    with pytest.raises(SelectionError) as error:
        resolve_rename(record(blocks__0="Linear"), record(fc="Linear"), {"blocks.*": "h.*"})
    assert str(error.value) == "rename: 'h.*' matches no layer of the expected Net; 'blocks.*' makes it h.0"


@pytest.mark.parametrize("right", ["h", "h.**", "h.*.*"])
def test_a_rename_with_other_wildcards_on_the_right_is_refused(right: str) -> None:
    with pytest.raises(SelectionError) as error:
        resolve_rename(record(b__0="Linear"), record(h__0="Linear"), {"b.*": right})
    assert str(error.value) == f"rename: 'b.*' and {right!r} have not the same wildcards in the same order"


def test_what_the_user_says_leaves_the_other_names_to_the_rest() -> None:
    old, new = record(a="ReLU", b="Linear"), record(a="Linear", c="ReLU")
    assert match(new, old, {"b": "a"}) == {"b": "a", "a": "c"}


def test_a_root_that_the_user_calls_another_layer_is_that_alone() -> None:
    old = Record(model="Net", layers={n: Layer(name=n, type="A") for n in ("(root)", "core")})
    new = Record(model="Net", layers={"(root)": Layer(name="(root)", type="A")})
    assert match(new, old, {"core": "(root)"}) == {"core": "(root)"}


# --- a record under other names -----------------------------------------------------------------------------------


def test_the_names_of_layers_change() -> None:
    assert [layer.name for layer in renamed(record(a="Linear", b="ReLU"), {"a": "c"}).layers.values()] == ["c", "b"]


def test_what_parameters_are_tied_to_is_renamed() -> None:
    tied = Parameter(name="weight", shape=(2,), dtype="float32", device="cpu", tied_to="wte.weight")
    old = Record(model="Net", layers={"head": Layer(name="head", type="Linear", parameters=(tied,))})
    new = renamed(old, {"wte": "embed", "head": "out"})
    assert new["out"].parameters[0].tied_to == "embed.weight"


def test_what_is_tied_to_the_root_s_own_parameter_is_renamed_with_the_root() -> None:
    tied = Parameter(name="weight", shape=(2,), dtype="float32", device="cpu", tied_to="scale")
    old = Record(model="Net", layers={"head": Layer(name="head", type="Linear", parameters=(tied,))})
    assert renamed(old, {"(root)": "net"})["head"].parameters[0].tied_to == "net.scale"


def called(
    name: str, *, source: str | None = None, root: str = "(root)", response: IsolatedResponse | None = None
) -> Layer:
    value = Value(path="input", shape=(2,), dtype="float32", device="cpu", source=source)
    call = Call(root=root, root_training=False, index=0, inputs=(value,), response=response)
    return Layer(name=name, type="Linear", calls=(call,))


def test_sources_are_renamed_with_the_number_of_the_call() -> None:
    old = Record(model="Net", layers={"b": called("b", source="a (call 2) output")})
    assert renamed(old, {"a": "x.y"})["b"].calls[0].inputs[0].source == "x.y (call 2) output"


def test_roots_of_calls_are_renamed() -> None:
    old = Record(model="Net", layers={"a": called("a", root="encoder")})
    assert renamed(old, {"encoder": "enc"})["a"].calls[0].root == "enc"


def test_children_are_renamed_in_the_response_of_their_container() -> None:
    response = IsolatedResponse(
        recipes={"input": "2 2^0", "fc output": "2 2^0", "weight": "2^0"},
        handed=(EmittedTensor(where="fc (call 2) input", passed="norm output"), EmittedTensor(where="output")),
        without_gradient=("norm output", "weight"),
    )
    old = Record(model="Net", layers={"block": called("block", response=response)})
    new = renamed(old, {"block.fc": "h.proj", "block.norm": "h.ln", "block": "h"})["h"].calls[0].response
    assert new == IsolatedResponse(
        recipes={"input": "2 2^0", "proj output": "2 2^0", "weight": "2^0"},
        handed=(EmittedTensor(where="proj (call 2) input", passed="ln output"), EmittedTensor(where="output")),
        without_gradient=("ln output", "weight"),
    )


def test_a_container_is_found_under_another_name_whatever_the_order_its_children_are_told_in() -> None:
    kinds = {"gate": "Linear", "squash": "Sigmoid", "plain": "Linear"}
    ran, made = list(kinds), ["gate", "plain", "squash"]
    old, new = (
        record(**{at: "Block"} | {f"{at}.{name}": kinds[name] for name in names})
        for at, names in (("block", ran), ("unit", made))
    )
    assert match(new, old)["block"] == "unit"


def test_a_container_with_another_name_is_found_though_one_layer_in_it_is_another() -> None:
    class Block(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(4, 8), act, nn.Linear(8, 4)

    def listed(name: str, *acts: nn.Module) -> Record:
        return structure(nn.ModuleDict({name: nn.ModuleList(Block(act) for act in acts)}))

    old = listed("blocks", nn.ReLU(), nn.ReLU(), nn.ReLU())
    new = listed("layers", nn.ReLU(), nn.ELU(), nn.ReLU())
    found = match(new, old)
    assert found == {name: name.replace("blocks", "layers") for name in old.layers}
