"""Draw the pictures of the explanations as SVG: ``python docs/drawings/draw.py``."""

from __future__ import annotations

from pathlib import Path

import kernel_drawings
from drawing import SvgDrawing


def network() -> SvgDrawing:
    """Draw the network of a UEFL client."""
    d = SvgDrawing(860, 330, "The network of a UEFL client")
    d.box(20, 60, 90, 60, "image")
    d.box(150, 60, 110, 60, "encoder", "convolutions", kind="blue")
    d.box(300, 60, 130, 60, "features", "H'W' tokens of", "D channels")
    d.box(470, 60, 150, 60, "nearest codeword", "for each of the s", "segments of a token", kind="orange")
    d.box(660, 60, 90, 60, "head", "dropout", kind="blue")
    d.box(780, 60, 70, 60, "classes")
    for x0, x1 in ((110, 150), (260, 300), (430, 470), (620, 660), (750, 780)):
        d.arrow((x0, 90), (x1 - 1, 90))
    d.frame(380, 165, 330, 140, "codebook of this client")
    d.box(392, 200, 150, 80, "shared codewords", "averaged by the", "server every round", kind="green")
    d.box(550, 200, 150, 80, "added codewords", "of this client only,", "if it is uncertain", kind="orange")
    d.arrow((545, 165), (545, 122))
    d.arrow((730, 122), (730, 235), (712, 235))
    d.text(738, 200, "entropy over T", "small", "start")
    d.text(738, 216, "passes decides", "small", "start")
    d.text(20, 215, "Encoder, head and shared codewords", "small", "start")
    d.text(20, 231, "are the same at every client.", "small", "start")
    return d


def federated_round() -> SvgDrawing:
    """Draw one round between the server and a client."""
    d = SvgDrawing(860, 400, "One round between the server and a client")
    d.frame(15, 15, 300, 370, "server")
    d.frame(545, 15, 300, 370, "each client, on its own images")
    d.box(40, 55, 250, 56, "choose the clients", "of this round", kind="blue")
    d.box(570, 95, 250, 56, "load the model", "and its own codewords", kind="green")
    d.box(570, 175, 250, 56, "train", "local epochs, fresh optimizer", kind="green")
    d.box(570, 255, 250, 56, "measure", "on holdout images", kind="green")
    d.box(
        40,
        275,
        250,
        70,
        "check each reply, then average",
        "shape, finite, size;",
        "weights by examples",
        kind="blue",
    )
    d.box(
        40,
        165,
        250,
        56,
        "decide at the end of an iteration",
        "entropy > (1 + gamma) x minimum",
        kind="orange",
    )
    d.arrow((290, 83), (430, 83), (430, 123), (569, 123))
    d.text(430, 57, "message: model, options,", "small")
    d.text(430, 73, "expected tensors", "small")
    d.arrow((695, 151), (695, 174))
    d.arrow((695, 231), (695, 254))
    d.arrow((569, 283), (430, 283), (430, 310), (291, 310))
    d.text(430, 262, "reply: changed model,", "small")
    d.text(430, 276, "metrics", "small")
    d.arrow((165, 275), (165, 222))
    d.arrow((165, 165), (165, 112))
    d.text(430, 345, "Images never leave the client.", "small")
    return d


def search() -> SvgDrawing:
    """Draw the search and its certificate."""
    d = SvgDrawing(860, 300, "The exact search")
    d.box(20, 40, 110, 60, "row x", "d elements")
    d.box(170, 40, 180, 60, "score all codewords", "fast, low precision", kind="blue")
    d.box(390, 40, 170, 60, "best and second best", "and their gap")
    d.box(600, 40, 240, 60, "gap > error bound?", "the bound covers every rounding", kind="orange")
    d.arrow((130, 70), (169, 70))
    d.arrow((350, 70), (389, 70))
    d.arrow((560, 70), (599, 70))
    d.box(640, 205, 200, 60, "index", "certified", kind="green")
    d.box(
        300, 205, 230, 60, "evaluate the candidates", "in float64; ties to the", "lowest index", kind="blue"
    )
    d.arrow((760, 100), (760, 204))
    d.text(750, 155, "yes: most rows", "small", "end")
    d.arrow((640, 100), (415, 204))
    d.text(500, 140, "no: a few rows", "small", "end")
    d.arrow((530, 235), (639, 235))
    d.text(150, 235, "The index is the argmin of the", "small")
    d.text(150, 251, "float64 distance in both cases.", "small")
    return d


def layers() -> SvgDrawing:
    """Draw the layers of the code."""
    d = SvgDrawing(860, 430, "The layers of the code: arrows point from the importer to the imported")
    d.frame(15, 15, 830, 265, "uefl: federated learning")
    d.box(
        40,
        45,
        780,
        44,
        "command line, Python interface, suites",
        "uefl.cli  uefl.api  uefl.suites  uefl.deploy",
    )
    d.box(40, 110, 380, 44, "algorithms", "one file each: FedAvg, UEFL, FedUL ...", kind="orange")
    d.box(440, 110, 380, 44, "runs and reports", "uefl.run  uefl.report")
    d.box(40, 175, 380, 44, "server and client", "rounds, checks, averages; the step loop", kind="blue")
    d.box(440, 175, 380, 44, "engines", "in this process, in workers, over a network")
    d.box(40, 234, 780, 36, "data, models, configuration")
    d.frame(15, 295, 830, 120, "uefl_kernels: kernels and layers, without federated learning")
    d.box(40, 325, 250, 70, "layers", "VectorQuantize, ResidualVQ,", "KMeans, MCDropout", kind="green")
    d.box(305, 325, 250, 70, "ops", "schema, float64 reference,", "autograd, Triton", kind="green")
    d.box(570, 325, 250, 70, "csrc", "C++ and CUDA kernels", "on raw pointers", kind="green")
    d.arrow((290, 360), (304, 360))
    d.arrow((555, 360), (569, 360))
    d.arrow((430, 89), (430, 109))
    d.arrow((430, 154), (430, 174))
    d.arrow((430, 219), (430, 233))
    d.arrow((430, 270), (430, 324))
    return d


DRAWINGS = (network, federated_round, search, layers, *kernel_drawings.DRAWINGS)


def main() -> None:
    """Draw all."""
    images = Path(__file__).parents[1] / "images"
    for draw in DRAWINGS:
        draw().save(images / f"{draw.__name__.replace('_', '-')}.svg")


if __name__ == "__main__":
    main()
