"""`watch(positions="last")`: one forward over a sequence beside the newest step of decoding, in two processes."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, Record, UsageError, assert_same_behavior

N = 9


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def trained(probe, model, ids):
    """Return the record of a step of training."""
    watch = probe.watch(model, positions="last")
    logits = model(ids).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    watch.close()
    return watch.last


def decoded(probe, model, ids, drop=False):
    """Return the record of the last step of decoding."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    past = None
    with torch.no_grad(), probe.watch(model, positions="last") as watch:
        for position in range(ids.shape[1]):
            step = {"position_ids": torch.tensor([[position]])} if drop else {}
            past = model(ids[:, position : position + 1], **{name: past}, use_cache=True, **step)[name]
            if drop and position == 3:
                past.crop(-1)  # the newest entry is lost
    return watch.last


@pytest.mark.parametrize(("make", "batch"), [(gpt2, 1), (llama, 3)])
def test_a_training_forward_equals_decoding_of_the_same_weights(make, batch, tmp_path):
    probe = ModelProbe()
    model = probe.build(make).eval()
    ids = probe.randint(0, 100, (batch, N))
    trained(probe, model, ids).save(tmp_path / "trained.json")
    decoded(probe, model, ids).save(tmp_path / "served.json")
    actual, expected = (Record.load(tmp_path / name) for name in ("served.json", "trained.json"))
    assert_same_behavior(actual, expected, structure=False)
    assert actual["lm_head"].output.shape == expected["lm_head"].output.shape == (batch, 1, 100)


def test_the_modes_of_trainer_and_server_need_not_be_the_same():
    probe = ModelProbe()
    model = probe.build(llama).train()
    ids = probe.randint(0, 100, (1, N))
    expected = trained(probe, model, ids)
    assert_same_behavior(decoded(probe, model.eval(), ids), expected, structure=False)


def scale(tensor):
    with torch.no_grad():
        tensor.mul_(1.1)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (gpt2, lambda m: setattr(m.transformer.h[1].ln_1, "eps", 0.1), r"transformer\.h\.1\.ln_1: own code changed"),
        (llama, lambda m: scale(m.model.layers[1].mlp.up_proj.weight), r"model\.layers\.1\.mlp\.up_proj: weights"),
    ],
)
def test_the_first_layer_that_differs_in_the_server_is_named(make, change, message, tmp_path):
    probe = ModelProbe()
    model = probe.build(make).eval()
    ids = probe.randint(0, 100, (1, N))
    trained(probe, model, ids).save(tmp_path / "trained.json")
    server = copy.deepcopy(model)
    change(server)
    decoded(probe, server, ids).save(tmp_path / "served.json")
    actual, expected = (Record.load(tmp_path / name) for name in ("served.json", "trained.json"))
    with pytest.raises(AssertionError, match=f"^{message}"):
        assert_same_behavior(actual, expected, structure=False)


def test_a_cache_that_loses_an_entry_is_found_in_the_first_attention():
    probe = ModelProbe()
    model = probe.build(llama).eval()
    ids = probe.randint(0, 100, (1, N))
    actual, expected = decoded(probe, model, ids, drop=True), trained(probe, model, ids)
    with pytest.raises(AssertionError) as error:
        assert_same_behavior(actual, expected, structure=False)
    causes = str(error.value).partition("Moved after")[0]
    assert "model.layers.0.self_attn" in causes
    assert "layers.1" not in causes


SERVER = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pytest_modelprobe import ModelProbe

weights, request, record = sys.argv[1:]
config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(config).eval()
model.load_state_dict(torch.load(weights))
with ModelProbe() as probe:
    watch = probe.watch(model, positions="last")
    model.generate(torch.load(request), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    watch.last.save(record)
"""


@pytest.mark.usefixtures("_forked")
def test_a_server_in_another_process_is_compared(tmp_path):
    probe = ModelProbe()
    model = probe.build(gpt2).eval()
    prompt = probe.randint(2, 100, (1, N))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(prompt, tmp_path / "request.pt")
    (tmp_path / "server.py").write_text(SERVER)
    names = "server.py", "weights.pt", "request.pt", "record.json"
    done = subprocess.run([sys.executable, *(tmp_path / n for n in names)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    ids = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = trained(probe, model, ids[:, :-1])  # the last token is returned and not fed
    assert_same_behavior(Record.load(tmp_path / "record.json"), expected, structure=False)
    with pytest.raises(AssertionError):  # of another sequence
        assert_same_behavior(Record.load(tmp_path / "record.json"), trained(probe, model, ids[:, :-2]), structure=False)


def test_as_many_heads_as_positions_are_left_out_and_told():
    probe = ModelProbe()
    model = probe.build(lambda: llama(attn_implementation="eager")).eval()
    ids = probe.randint(0, 100, (1, 4))  # there are 4 heads
    full, step = trained(probe, model, ids), decoded(probe, model, ids)
    assert_same_behavior(step, full, structure=False)
    (note,) = full.notes
    assert note.startswith(
        "of values the last position alone is recorded, without gradients; these have no axis of positions that is "
        "known, and are left out: "
    )
    assert len(full["model.layers.0.self_attn"].calls[0].outputs) == 1  # not the weights of attention


class Flattens(nn.Module):
    """A layer that has batch and positions in one axis, as a router of experts does."""

    def forward(self, x):
        return x.flatten(0, 1)


def test_an_axis_with_batch_and_positions_is_left_out_also_if_a_size_is_the_length():
    model = nn.Sequential(nn.Linear(8, 8), Flattens())
    with ModelProbe() as probe, probe.watch(model, positions="last") as watch:
        model(torch.randn(1, 8, 8))
    assert watch.last["0"].output.shape == (1, 1, 8)
    assert not watch.last["1"].calls[0].outputs
    assert "output of *" in watch.last.notes[0]


def test_a_model_without_positions_is_an_error():
    model = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"^positions is 'all' or 'last'; got 'first'$"):
        ModelProbe().watch(model, positions="first")
    with ModelProbe() as probe, probe.watch(model, positions="last") as watch:
        model(torch.ones(4))
    with pytest.raises(UsageError, match=r'^positions="last" found no axis of positions: the first input'):
        _ = watch.record


def test_the_numbers_are_those_of_the_last_position():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 5, 4)
    with ModelProbe() as probe, probe.watch(model, positions="last") as watch:
        model(x)
        model(x)
    assert watch.record.forwards == 2
    assert watch.last["0"].output.statistics.count == 6
    assert watch.last["0"].output.statistics.mean == pytest.approx(model[0](x)[:, -1].mean().item(), abs=1e-6)
    assert watch.last["0"].calls[0].inputs[0].shape == (2, 1, 4)


def test_gradients_of_parameters_are_recorded_also_under_checkpointing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x = torch.randn(2, 5, 4, requires_grad=True)
    with ModelProbe() as probe, probe.watch(model, positions="last") as watch:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()
    assert watch.last["0"].output.backward is None
    assert watch.last["0"].parameters[0].gradient.statistics.count == 16


def test_it_is_compared_only_with_its_like():
    model, records = nn.Linear(4, 3), []
    for positions in ("last", "all"):
        with ModelProbe().watch(model, positions=positions) as watch:
            model(torch.ones(2, 5, 4))
        records.append(watch.last)
    with pytest.raises(UsageError, match=r"^only the actual record is of the last position alone: watch both with"):
        assert_same_behavior(*records)
