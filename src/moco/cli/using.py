"""The verbs that use what was learned: embed, search, cluster, export, import."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from moco.cli.parsing import Given, Output, add_output, add_training_options, leaf
from moco.embedding_settings import ClusterSettings, EmbedSettings, SearchSettings
from moco.errors import UserError
from moco.interop.settings import ExportSettings
from moco.options import add_options

RUN = "run folder, a checkpoint in one, or the name of a timm model"
IN = SearchSettings.model_fields["embeddings"].description
SKIPPED = frozenset({"data", "embeddings"})


def _add_embed(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "embed",
        _embed,
        help="write the features of pictures into a Parquet or .npy file; goes on where it was stopped",
        usage="moco embed RUN [DATA ...] --out FILE.parquet [--OPTION VALUE ...]",
        description="Encode pictures and write a row for each: number, path, label, feature. After a crash or Ctrl-C\n"
        "the same command goes on where it was. Pictures that cannot be read are listed in FILE.skipped.csv.",
        epilog="examples:\n  moco embed runs/first photos/ --out photos.parquet\n"
        "  moco embed resnet50 photos/ --pretrained --dtype float16 --out photos.npy\n",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("data", nargs="*", metavar="DATA", help=EmbedSettings.model_fields["data"].description)
    add_output(parser)
    add_options(parser, EmbedSettings, skip=SKIPPED, defaults={})


def _embed(given: Given) -> int:
    from moco.embedding import write_embeddings

    if not given.get("out"):
        raise UserError("name the file to write: --out FILE.parquet, or FILE.npy")
    with Output(given) as output:
        found = write_embeddings(given.pop("run"), given.pop("data", None), **given)
        output.result = {"file": found.path, "rows": len(found)} | dict(found.about)
    return 0


def _add_search(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "search",
        _search,
        help="the pictures of an embedding that are most like a picture",
        usage="moco search RUN PICTURE ... --in FILE.parquet [--OPTION VALUE ...]",
        description="Find the pictures nearest to each query by cosine, print them and draw a contact sheet.",
        epilog="example:\n  moco search runs/first cat.jpg --in photos.parquet --top 20\n",
    )
    parser.add_argument("run", metavar="RUN", help="what the embedding was made with: " + RUN)
    parser.add_argument("query", nargs="+", metavar="PICTURE", help="picture files, or a folder of them")
    parser.add_argument("--in", dest="embeddings", metavar="FILE", help=IN)
    add_output(parser)
    add_options(parser, SearchSettings, skip=SKIPPED, defaults={})


def _search(given: Given) -> int:
    from moco.embedding.searching import search

    with Output(given) as output:
        found = search(given.pop("run"), given.pop("query"), given.pop("embeddings", ""), **given)
        output.result = [asdict(one) for one in found]
    return 0


def _add_cluster(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "cluster",
        _cluster,
        help="group the pictures of an embedding: lists and contact sheets in a folder",
        usage="moco cluster --in FILE.parquet --out FOLDER [--clusters auto|K] [--OPTION VALUE ...]",
        description="Group pictures by mini-batch k-means on features of length 1. The folder gets clusters.csv, and\n"
        "for each cluster a list of its pictures, the most central first, and a contact sheet.",
        epilog="example:\n  moco cluster --in photos.parquet --clusters 40 --out groups/\n",
    )
    parser.add_argument("--in", dest="embeddings", metavar="FILE", help=IN)
    add_output(parser)
    add_options(parser, ClusterSettings, skip=SKIPPED, defaults={})


def _cluster(given: Given) -> int:
    from moco.embedding.clustering import cluster

    with Output(given) as output:
        folder = cluster(given.pop("embeddings", ""), given.pop("out", ""), **given).out
        output.result = {"folder": folder} | json.loads((folder / "clusters.json").read_text(encoding="utf-8"))
    return 0


def _add_export(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "export",
        _export,
        help="write the encoder for torchvision, timm, Hugging Face, ONNX, torch.export, detectron2 or safetensors",
        usage="moco export RUN --to TARGET [--encoder query|key] [--head] [--out FOLDER]",
        description="Write the encoder of a run into a folder, with how pictures are prepared and a script that loads\n"
        "it. It is loaded back at once, and must give the features of the run.",
        epilog="examples:\n  moco export runs/first --to timm\n  moco export runs/first --to onnx --out encoder/\n",
    )
    parser.add_argument("run", metavar="RUN", help="run folder, or a checkpoint in one")
    add_output(parser)
    add_options(parser, ExportSettings, defaults={"to": ""})


def _export(given: Given) -> int:
    from moco.interop.exporting import export_run

    with Output(given) as output:
        output.result = {"folder": export_run(given.pop("run"), **given)}
    return 0


def _add_import(verbs: Any, arguments: list[str]) -> None:
    parser = leaf(
        verbs,
        "import",
        _import,
        help="make a run from a checkpoint of the authors' code, lightly, solo-learn, torchvision or timm",
        usage="moco import FILE --out RUN [--allow-partial] [--trust-pickle] [--SETTING VALUE ...]",
        description="Read .pt, .pth, .pth.tar, .ckpt, .bin or .safetensors without running anything in it, tell whose\n"
        "it is, and make a run folder of it: to evaluate, to export and, where it has all parts, to go on with.\n"
        "Settings that the file does not decide can be given as for moco pretrain.",
        epilog="example:\n  moco import moco_v2_200ep_pretrain.pth.tar --out runs/official\n"
        "  moco resume runs/official --data photos/ --epochs 300\n",
    )
    parser.add_argument("file", metavar="FILE", help="file of weights")
    add_output(parser)
    add_training_options(parser, arguments)


def _import(given: Given) -> int:
    from moco.interop.importing import import_run

    if not given.get("out"):
        raise UserError("name the run folder to create: --out RUN")
    with Output(given) as output:
        found = import_run(given.pop("file"), **given)
        output.result = {
            "run": found.run.path, "weights": str(found.weights), "epochs": found.epochs,
            "continues": found.continues, "notes": found.notes,
        }  # fmt: skip
    return 0


VERBS = (_add_embed, _add_search, _add_cluster, _add_export, _add_import)
