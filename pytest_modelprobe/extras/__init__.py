"""Extras: what many tests do not need. Each folder can be deleted, and all else goes on as before.

The core knows none of them. `EXTRAS` is the one table by which they reach users.
"""

from __future__ import annotations

from pytest_modelprobe.extension import Extra

EXTRAS = {
    "ablation": Extra(
        names=dict.fromkeys(["ablation", "assert_layer_matters"], "ablations"),
        probe={"ablation": "ablations:ablation_of_probe"},
    ),
    "adapters": Extra(
        checks={"adapter": "adapter", "same_function": "change"},
        apart={
            "adapter": "as it needs the function that attaches the adapter",
            "same_function": "as it needs the function that changes the model",
        },
    ),
    "bisect": Extra(commands={"bisect": "command"}),
    "compilation": Extra(
        checks={"compile_parity": "parity", "compiles_whole": "whole", "export_parity": "parity"},
        apart={
            "compile_parity": "as compiling takes long",
            "compiles_whole": "as compiling takes long, and not every model is meant to be compiled",
            "export_parity": "as only some models are meant to be exported",
        },
        runs={"with_graph_breaks": "graphs"},
    ),
    "doctor": Extra(commands={"doctor": "command"}),
    "exporters": Extra(
        exporters=dict.fromkeys(["GROUP", "Exporter", "exporter", "readings", "scalars"], "export"),
    ),
    "mutation": Extra(plugin="plugin"),
    "operations": Extra(
        explanations={
            "compiled graph": "graphs:of_compiled",
            "diagnosis": "explanation:of_diagnosis",
            "graph": "graphs:of_program",
            "pair": "explanation:of_pair",
            "record": "explanation:streams",
            "pair of records": "explanation:of_streams",
            "run": "explanation:of_run",
            "runs": "explanation:of_runs",
        },
    ),
    "pictures": Extra(
        names={"assert_attends_to": "drawing"},
        probe=dict.fromkeys(["feature_maps", "grad_cam", "plot_distributions", "plot_gradients"], "drawing"),
    ),
    "ports": Extra(
        needs=("scan",),
        commands={"compare": "command"},
        names={"precision": "precision"},
        checks={"packed_documents": "packing"},
        apart={"packed_documents": "as only some models are meant to take them"},
        comparison={"Pairing": "pairing", "pair": "pairing", "port_failure": "pairing"},
        probe={"precision": "precision:precision_of"},
    ),
    "ranks": Extra(
        plugin="plugin",
        marker={"world_size": "plugin:error_of_marker", "timeout": "plugin:error_of_marker"},
        probe={"merged": "merging:merged_by_probe"},
        record={"merge": "merging:merge_of_record"},
    ),
    "replay": Extra(plugin="plugin", commands={"replay": "command"}),
    "scan": Extra(commands={"scan": "command"}),
    "selection": Extra(selection="using"),
    "trainers": Extra(
        needs=("exporters",),
        trainers={
            "LightningProbe": "lightning",
            "MMEngineProbe": "mmengine",
            "StepLog": "step_log",
            "TrainerProbe": "transformers",
        },
    ),
    "training_state": Extra(
        names={"Invariants": "invariants", "assert_invariants": "invariants"},
        checks={
            "deferred_initialization": "deferred",
            "initial_loss": "initial",
            "resume": "training",
            "wholly_loaded": "checkpoint",
            "workers_differ": "training",
        },
        apart={
            "resume": "as it needs what makes and trains a state",
            "wholly_loaded": "as it needs the function that loads",
            "deferred_initialization": "as it needs the function that makes the model",
            "initial_loss": "as a trained model begins lower",
        },
        watch={"invariants": "invariants:of_watch"},
    ),
}
"""Folder → what it brings."""
