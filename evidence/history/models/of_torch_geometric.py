"""Layers and models of torch_geometric that need no compiled package beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from . import Inputs, Model, drawn

NODES, EDGES, WIDTH, OUT = 10, 30, 8, 6


def _integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


EDGE_INDEX = _integers(NODES, 2, EDGES)
BATCH = torch.tensor([0] * 6 + [1] * 4)


def graph() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), EDGE_INDEX))


def weighted() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), EDGE_INDEX, drawn(EDGES, seed=1).abs()))


def with_edges() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), EDGE_INDEX, drawn(EDGES, 3, seed=1)))


def typed() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), EDGE_INDEX, _integers(3, EDGES, seed=1)))


def batched() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), BATCH))


def graph_of_batch() -> Inputs:
    return Inputs((drawn(NODES, WIDTH), _within_graphs()), {"batch": BATCH})


def dense() -> Inputs:
    return Inputs((drawn(2, 5, WIDTH), (drawn(2, 5, 5, seed=1) > 0).to(torch.get_default_dtype())))


def _within_graphs() -> Tensor:
    """Return edges that stay within a graph of the batch."""
    first, second = _integers(6, 2, 18), 6 + _integers(4, 2, 12, seed=1)
    return torch.cat([first, second], dim=1)


def _sorted_edges() -> Tensor:
    """Return edges sorted by their target, as an LSTM over neighbors needs them."""
    return EDGE_INDEX[:, EDGE_INDEX[1].argsort(stable=True)]


class Two(nn.Module):
    """Two layers of a graph network with an activation between them, as in the examples of the library."""

    def __init__(self, c1: nn.Module, c2: nn.Module) -> None:
        super().__init__()
        self.c1, self.c2 = c1, c2

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.c2(self.c1(x, *rest).tanh(), *rest)


class Within(nn.Module):
    """A layer between two linear ones."""

    def __init__(self, layer: nn.Module, wide: int = WIDTH) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(wide, OUT)

    def forward(self, x: Tensor, *rest: Tensor, **named: Tensor) -> Any:
        out = self.layer(self.first(x), *rest, **named)
        return (self.last(out[0]), *out[1:]) if isinstance(out, tuple) else self.last(out)


class Positive(nn.Module):
    """A layer that takes positive numbers only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.layer(x.exp(), *rest)


def two(name: str, inputs: Callable[[], Inputs], kind: str = "", **options: Any) -> Model:
    """Return a network of two layers of a class."""
    heads = options.get("heads", 1)

    def build() -> nn.Module:
        layer = getattr(pyg, kind or name)
        return Two(layer(WIDTH, WIDTH, **options), layer(WIDTH * heads, OUT, **options))

    return Model(name, build, inputs)


def within(name: str, layer: Callable[[], nn.Module], inputs: Callable[[], Inputs], **options: Any) -> Model:
    return Model(name, lambda: Within(layer(), **options), inputs)


def mlp(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[2]))


def degrees() -> Tensor:
    return torch.tensor([1, 2, 3, 2, 1, 1])


def schnet() -> nn.Module:
    """A SchNet that is given its edges: finding them takes a compiled package."""

    class AllPairs(nn.Module):
        def forward(self, positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
            same = batch[:, None] == batch[None]
            edges = (same & ~torch.eye(len(batch), dtype=torch.bool)).nonzero().T
            return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    model: nn.Module = pyg.SchNet(16, 16, 2, 10, interaction_graph=AllPairs())
    return model


def molecules() -> Inputs:
    return Inputs((1 + _integers(8, NODES), drawn(NODES, 3), BATCH))


HETERO = (["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper")])


def hetero() -> Inputs:
    edges = {
        ("paper", "cites", "paper"): _integers(6, 2, 9),
        ("author", "writes", "paper"): torch.stack([_integers(4, 8), _integers(6, 8, seed=1)]),
    }
    return Inputs(({"paper": drawn(6, WIDTH), "author": drawn(4, WIDTH, seed=1)}, edges))


basic: dict[str, Any] = {"in_channels": WIDTH, "hidden_channels": WIDTH, "num_layers": 2, "out_channels": OUT}

# fmt: off
MODELS = [
    # Models of the library.
    Model("GCN", lambda: pyg.GCN(**basic), graph),
    Model("GCN-jk-lstm", lambda: pyg.GCN(**basic, jk="lstm", norm="graph_norm"), graph),
    Model("GraphSAGE", lambda: pyg.GraphSAGE(**basic, jk="cat", norm="batch_norm"), graph),
    Model("GIN", lambda: pyg.GIN(**basic, norm="layer_norm"), graph),
    Model("GAT", lambda: pyg.GAT(**basic, heads=2, jk="max"), graph),
    Model("GAT-v2", lambda: pyg.GAT(**basic, heads=2, v2=True, edge_dim=3), lambda: Inputs(
        graph().args, {"edge_attr": drawn(EDGES, 3, seed=1)}
    )),
    Model("PNA", lambda: pyg.PNA(
        **basic, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=degrees()
    ), graph),
    Model("EdgeCNN", lambda: pyg.EdgeCNN(**basic), graph),
    Model("MLP", lambda: pyg.MLP([WIDTH, 16, OUT], norm="batch_norm"), lambda: Inputs((drawn(NODES, WIDTH),))),
    Model("MLP-graph-norm", lambda: pyg.MLP([WIDTH, 16, 16, OUT], norm="graph_norm", act="leaky_relu"), batched),
    Model("AttentiveFP", lambda: pyg.AttentiveFP(WIDTH, 16, OUT, edge_dim=3, num_layers=2, num_timesteps=2), lambda:
        Inputs((drawn(NODES, WIDTH), EDGE_INDEX, drawn(EDGES, 3, seed=1), BATCH))),
    Model("SchNet", schnet, molecules),
    Model("LINKX", lambda: pyg.LINKX(NODES, WIDTH, 16, OUT, num_layers=2), graph),
    Model("LightGCN", lambda: pyg.LightGCN(NODES, WIDTH, 2), lambda: Inputs((EDGE_INDEX,))),
    Model("SignedGCN", lambda: pyg.SignedGCN(WIDTH, WIDTH, 2), lambda: Inputs(
        (drawn(NODES, WIDTH), EDGE_INDEX[:, :15], EDGE_INDEX[:, 15:])
    )),
    Model("RECT_L", lambda: pyg.RECT_L(WIDTH, 16), graph),
    Model("DeepGCNLayer", lambda: Within(pyg.DeepGCNLayer(
        pyg.GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True), pyg.LayerNorm(WIDTH), nn.ReLU(), block="res+"
    )), graph),
    within("GPSConv", lambda: pyg.GPSConv(WIDTH, pyg.GCNConv(WIDTH, WIDTH), heads=2), graph),
    within("GPSConv-batch", lambda: pyg.GPSConv(WIDTH, pyg.SAGEConv(WIDTH, WIDTH), heads=2), graph_of_batch),
    # Layers.
    two("GCNConv", weighted),
    two("ChebConv", graph, K=3),
    two("SAGEConv-max", graph, "SAGEConv", aggr="max", project=True),
    two("SAGEConv-std", graph, "SAGEConv", aggr=["mean", "max", "std"]),
    two("SAGEConv-lstm", lambda: Inputs((drawn(NODES, WIDTH), _sorted_edges())), "SAGEConv", aggr="lstm"),
    two("SAGEConv-softmax", graph, "SAGEConv", aggr="softmax", aggr_kwargs={"learn": True}),
    two("GraphConv", weighted),
    two("ResGatedGraphConv", graph),
    two("GATConv", with_edges, edge_dim=3, heads=2),
    two("GATv2Conv", with_edges, edge_dim=3, heads=2, share_weights=True),
    two("TransformerConv", with_edges, edge_dim=3, heads=2, beta=True),
    two("SuperGATConv", graph, heads=2),
    two("TAGConv", weighted),
    two("SGConv", weighted, K=2),
    two("SSGConv", weighted, alpha=0.1, K=2),
    two("ARMAConv", weighted, num_stacks=2, num_layers=2),
    two("MFConv", graph),
    two("GMMConv", with_edges, dim=3, kernel_size=4),
    Model("FeaStConv", lambda: Two(pyg.FeaStConv(8, 8, heads=2), pyg.FeaStConv(8, 6, heads=2)), graph),
    two("LEConv", weighted),
    two("ClusterGCNConv", graph, diag_lambda=0.5),
    two("FiLMConv", graph),
    two("EGConv", graph, num_heads=2, num_bases=2, aggregators=["mean", "std", "symnorm"]),
    two("GeneralConv", with_edges, in_edge_channels=3, heads=1, attention=True),
    two("HypergraphConv", graph),
    two("PDNConv", with_edges, edge_dim=3, hidden_channels=8),
    two("RGCNConv", typed, num_relations=3, num_bases=2),
    two("RGATConv", typed, num_relations=3),
    two("GENConv", with_edges, edge_dim=3, aggr="powermean", learn_p=True, msg_norm=True, learn_msg_scale=True),
    two("PNAConv", with_edges, aggregators=["mean", "std", "var"], scalers=["identity", "linear"],
        deg=degrees(), edge_dim=3),
    within("GatedGraphConv", lambda: pyg.GatedGraphConv(WIDTH, 2), weighted),
    Model("GINConv", lambda: Two(pyg.GINConv(mlp(8, 16, 8), train_eps=True), pyg.GINConv(mlp(8, 16, 6))), graph),
    Model("GINEConv", lambda: Two(
        pyg.GINEConv(mlp(8, 16, 8), edge_dim=3), pyg.GINEConv(mlp(8, 16, 6), train_eps=True, edge_dim=3)
    ), with_edges),
    Model("NNConv", lambda: Two(pyg.NNConv(8, 8, mlp(3, 8, 64)), pyg.NNConv(8, 6, mlp(3, 8, 48), aggr="mean")),
          with_edges),
    Model("EdgeConv", lambda: Two(pyg.EdgeConv(mlp(16, 16, 8)), pyg.EdgeConv(mlp(16, 16, 6), aggr="mean")), graph),
    within("CGConv", lambda: pyg.CGConv(WIDTH, dim=3, batch_norm=True), with_edges),
    Model("PointNetConv", lambda: Within(pyg.PointNetConv(mlp(11, 16, 8))), lambda: Inputs(
        (drawn(NODES, WIDTH), drawn(NODES, 3), EDGE_INDEX)
    )),
    Model("PointTransformerConv", lambda: Within(pyg.PointTransformerConv(WIDTH, WIDTH)), lambda: Inputs(
        (drawn(NODES, WIDTH), drawn(NODES, 3), EDGE_INDEX)
    )),
    Model("GCN2Conv", lambda: Within(pyg.GCN2Conv(WIDTH, alpha=0.1, theta=0.5, layer=1)), lambda: Inputs(
        (drawn(NODES, WIDTH), drawn(NODES, WIDTH, seed=1), EDGE_INDEX)
    )),
    Model("FAConv", lambda: Within(pyg.FAConv(WIDTH)), lambda: Inputs(
        (drawn(NODES, WIDTH), drawn(NODES, WIDTH, seed=1), EDGE_INDEX)
    )),
    within("AGNNConv", lambda: pyg.AGNNConv(), graph),
    within("APPNP", lambda: pyg.APPNP(3, 0.1), weighted),
    within("AntiSymmetricConv", lambda: pyg.AntiSymmetricConv(WIDTH, num_iters=2), graph),
    Model("HANConv", lambda: pyg.HANConv(WIDTH, WIDTH, HETERO, heads=2), hetero),
    Model("HeteroConv", lambda: pyg.HeteroConv({
        ("paper", "cites", "paper"): pyg.GCNConv(WIDTH, OUT),
        ("author", "writes", "paper"): pyg.SAGEConv((WIDTH, WIDTH), OUT),
    }), hetero),
    # Pooling.
    within("TopKPooling", lambda: pyg.TopKPooling(WIDTH, ratio=0.5), graph),
    within("SAGPooling", lambda: pyg.SAGPooling(WIDTH, ratio=0.5, GNN=pyg.GraphConv), graph),
    within("MemPooling", lambda: pyg.MemPooling(WIDTH, WIDTH, heads=2, num_clusters=3), batched),
    Model("DMoNPooling", lambda: pyg.DMoNPooling([WIDTH, 8], 3), dense),
    Model("DenseGCNConv", lambda: Two(pyg.DenseGCNConv(WIDTH, WIDTH), pyg.DenseGCNConv(WIDTH, OUT)), dense),
    Model("DenseSAGEConv", lambda: Two(pyg.DenseSAGEConv(WIDTH, WIDTH), pyg.DenseSAGEConv(WIDTH, OUT)), dense),
    Model("DenseGINConv", lambda: Two(pyg.DenseGINConv(mlp(8, 16, 8)), pyg.DenseGINConv(mlp(8, 16, 6))), dense),
    Model("DenseGATConv", lambda: Two(pyg.DenseGATConv(WIDTH, 4, heads=2), pyg.DenseGATConv(WIDTH, OUT)), dense),
    # Aggregations.
    within("MultiAggregation", lambda: pyg.MultiAggregation(["mean", "std", "max"]), batched, wide=3 * WIDTH),
    within("StdAggregation", lambda: pyg.StdAggregation(), batched),
    within("VarAggregation", lambda: pyg.VarAggregation(), batched),
    within("MedianAggregation", lambda: pyg.MedianAggregation(), batched),
    within("QuantileAggregation", lambda: pyg.QuantileAggregation([0.25, 0.75]), batched, wide=2 * WIDTH),
    within("SoftmaxAggregation", lambda: pyg.SoftmaxAggregation(learn=True, channels=WIDTH), batched),
    within("PowerMeanAggregation", lambda: Positive(pyg.PowerMeanAggregation(learn=True)), batched),
    within("LSTMAggregation", lambda: pyg.LSTMAggregation(WIDTH, WIDTH), batched),
    within("GRUAggregation", lambda: pyg.GRUAggregation(WIDTH, WIDTH), batched),
    within("Set2Set", lambda: pyg.Set2Set(WIDTH, 2), batched, wide=2 * WIDTH),
    within("SortAggregation", lambda: pyg.SortAggregation(3), batched, wide=3 * WIDTH),
    within("AttentionalAggregation", lambda: pyg.AttentionalAggregation(mlp(8, 8, 1), mlp(8, 8, 8)), batched),
    within("SetTransformerAggregation", lambda: pyg.SetTransformerAggregation(WIDTH, heads=2), batched),
    within("DeepSetsAggregation", lambda: pyg.DeepSetsAggregation(mlp(8, 8, 8), mlp(8, 8, 8)), batched),
    within("GraphMultisetTransformer", lambda: pyg.GraphMultisetTransformer(WIDTH, 3, heads=2), batched),
    within("DegreeScalerAggregation", lambda: pyg.DegreeScalerAggregation(
        ["mean", "std"], ["identity", "amplification", "attenuation"], degrees()
    ), batched, wide=6 * WIDTH),
    # Normalization.
    within("GraphNorm", lambda: pyg.GraphNorm(WIDTH), batched),
    within("InstanceNorm", lambda: pyg.InstanceNorm(WIDTH, affine=True), batched),
    within("LayerNorm-graph", lambda: pyg.LayerNorm(WIDTH), batched),
    within("PairNorm", lambda: pyg.PairNorm(), batched),
    within("DiffGroupNorm", lambda: pyg.DiffGroupNorm(WIDTH, 3), lambda: Inputs((drawn(NODES, WIDTH),))),
    within("MeanSubtractionNorm", lambda: pyg.MeanSubtractionNorm(), batched),
]
# fmt: on
