"""The pictures of the design pages: where data move in each kernel."""

from __future__ import annotations

from itertools import pairwise

from drawing import SvgDrawing


def search_gpu() -> SvgDrawing:
    """Draw the roles of the warps in a thread block of the Hopper search."""
    d = SvgDrawing(620, 540, "A thread block of the search on a Hopper GPU")
    d.text(20, 28, "global memory", "small", "start")
    d.box(20, 40, 250, 46, "rows x", "float32, float16 or bfloat16")
    d.box(350, 40, 250, 46, "codebook", "float16 tiles, packed once")
    d.frame(10, 108, 600, 360, "a thread block")
    d.box(
        20,
        140,
        250,
        82,
        "prepare: one or two warpgroups",
        "each lane has a ring of pieces;",
        "float16 tiles of rows, their",
        "lengths and rounding errors",
        kind="blue",
    )
    d.box(350, 148, 250, 66, "shared memory", "the codebook if it fits,", "else a ring of blocks")
    d.box(
        140,
        254,
        340,
        66,
        "multiply: two or three warpgroups",
        "64 rows each; products on tensor cores,",
        "the two least scores of each lane",
        kind="blue",
    )
    d.box(20, 354, 250, 66, "finish: one warpgroup", "gap > error bound?", "writes the index", kind="orange")
    d.box(
        350,
        354,
        250,
        82,
        "at the end: open rows",
        "between two codewords: float64;",
        "others: score again, then the",
        "candidates in float64",
        kind="orange",
    )
    d.box(140, 484, 340, 44, "indices", "the argmin of the float64 distance", kind="green")
    d.arrow((235, 86), (235, 139))
    d.arrow((475, 86), (475, 147))
    d.text(245, 128, "copies of each lane", "small", "start")
    d.text(485, 128, "bulk copies", "small", "start")
    d.arrow((145, 222), (145, 238), (230, 238), (230, 253))
    d.arrow((475, 214), (475, 238), (390, 238), (390, 253))
    d.arrow((230, 320), (230, 337), (145, 337), (145, 353))
    d.text(240, 342, "scores", "small", "start")
    d.arrow((270, 387), (349, 387), label="no")
    d.arrow((145, 420), (145, 452), (230, 452), (230, 483))
    d.text(240, 448, "yes: most rows", "small", "start")
    d.arrow((475, 436), (475, 452), (390, 452), (390, 483))
    return d


def kmeans_cpu() -> SvgDrawing:
    """Draw an iteration of k-means on the CPU."""
    d = SvgDrawing(620, 420, "An iteration of k-means on the CPU")
    d.box(20, 20, 270, 62, "grid of 16-bit integers", "greedy k-means++: exact products", kind="green")
    d.box(330, 20, 270, 62, "rows x", "read once in an iteration")
    d.box(20, 150, 270, 62, "centers", "in the dtype of x", kind="green")
    d.box(330, 150, 270, 62, "exact search", "or Elkan's bounds, if they save time", kind="blue")
    d.box(330, 250, 270, 62, "label changed?", "most rows keep their cluster", kind="orange")
    d.box(330, 350, 270, 56, "next row")
    d.box(
        20,
        250,
        270,
        78,
        "sums of the clusters",
        "64-bit integers: minus the row in the",
        "old sum, plus the row in the new sum",
        kind="green",
    )
    d.arrow((155, 82), (155, 149))
    d.text(165, 120, "first centers", "small", "start")
    d.arrow((465, 82), (465, 149))
    d.arrow((290, 181), (329, 181))
    d.arrow((465, 212), (465, 249))
    d.arrow((330, 281), (291, 281), label="yes")
    d.arrow((465, 312), (465, 349))
    d.text(475, 335, "no", "small", "start")
    d.arrow((155, 250), (155, 213))
    d.text(165, 236, "sum / count, after all rows", "small", "start")
    d.text(20, 360, "Threads may add in any order:", "small", "start")
    d.text(20, 377, "sums of integers have the same bits.", "small", "start")
    return d


def kmeans_gpu() -> SvgDrawing:
    """Draw the three launches of an iteration of k-means on a GPU."""
    d = SvgDrawing(620, 440, "The three launches of an iteration of k-means on a GPU")
    d.box(20, 30, 150, 62, "centers", kind="green")
    d.box(20, 190, 150, 62, "rows x", "268 MB")
    d.box(20, 320, 150, 78, "sums", "64-bit integers,", "for each cluster", kind="green")
    d.frame(190, 10, 420, 420, "an iteration: three launches, none waits for the host")
    d.box(220, 42, 360, 50, "1. pack", "centers to float16 tiles", kind="blue")
    d.box(220, 132, 360, 50, "2. search", "a new label for each row", kind="blue")
    d.frame(210, 205, 380, 215, "3. advance")
    d.box(220, 235, 360, 50, "compare old and new labels", "16 bytes for each row", kind="orange")
    d.box(
        220, 300, 360, 50, "move the rows that changed", "minus the old sum, plus the new sum", kind="orange"
    )
    d.box(220, 365, 360, 46, "new centers", "after a barrier of the grid; tests for the end", kind="orange")
    d.arrow((170, 61), (219, 61))
    d.arrow((400, 92), (400, 131))
    d.arrow((170, 205), (184, 205), (184, 157), (219, 157))
    d.arrow((400, 182), (400, 234))
    d.arrow((400, 285), (400, 299))
    d.arrow((170, 237), (200, 237), (200, 312), (219, 312))
    d.arrow((220, 335), (171, 335))
    d.arrow((400, 350), (400, 364))
    d.arrow((170, 388), (219, 388))
    d.arrow((580, 388), (600, 388), (600, 67), (581, 67))
    d.text(22, 270, "only the rows", "small", "start")
    d.text(22, 286, "that changed", "small", "start")
    return d


def mc_dropout_cpu() -> SvgDrawing:
    """Draw the passes of Monte Carlo dropout over a tile of rows."""
    d = SvgDrawing(620, 400, "Monte Carlo dropout of a tile of rows on the CPU")
    d.box(20, 20, 180, 62, "tile of rows", "one row per lane")
    d.box(
        240,
        20,
        360,
        62,
        "layers before the first dropout",
        "run once; all passes share the result",
        kind="blue",
    )
    d.frame(10, 105, 600, 205, "for each pass")
    d.box(20, 140, 150, 78, "counter", "(pass, row,", "stream, unit)")
    d.box(205, 140, 150, 78, "Philox", "8 masks of 16 bits", "per call", kind="blue")
    d.box(390, 140, 150, 78, "compare", "one vector of masks", "for a unit", kind="orange")
    d.box(
        205,
        245,
        395,
        50,
        "one multiply-add per unit and class",
        "of the units that the mask keeps",
        kind="blue",
    )
    d.box(20, 245, 150, 50, "softmax", kind="blue")
    d.box(
        20,
        335,
        580,
        50,
        "statistics of the rows",
        "mean and spread over the passes; no mask and no pass is stored",
        kind="green",
    )
    d.arrow((200, 51), (239, 51))
    d.arrow((170, 179), (204, 179))
    d.arrow((355, 179), (389, 179))
    d.arrow((465, 218), (465, 244))
    d.arrow((570, 82), (570, 244))
    d.arrow((205, 270), (171, 270))
    d.arrow((95, 295), (95, 334))
    return d


def mc_dropout_gpu() -> SvgDrawing:
    """Draw the shares of passes of Monte Carlo dropout on a GPU."""
    d = SvgDrawing(620, 430, "Monte Carlo dropout on a GPU")
    d.box(20, 20, 270, 62, "rows after the first layers", "float16 pairs, scales are powers of two")
    d.box(330, 20, 270, 62, "weights of the last layer", "float16 pairs")
    d.frame(10, 110, 600, 190, "a warp: 16 rows, a share of the passes")
    d.box(20, 150, 175, 62, "Philox", "masks in registers", kind="blue")
    d.box(222, 150, 175, 62, "drop pairs of units", "one mask, two units", kind="orange")
    d.box(425, 150, 175, 62, "tensor cores", "products of 16 rows", kind="blue")
    d.box(222, 235, 378, 50, "softmax and the statistics of the share", kind="blue")
    d.box(20, 330, 580, 40, "one slot for each row and share", kind="green")
    d.box(20, 385, 580, 40, "combine: adds the shares of a row in their order", kind="green")
    d.arrow((280, 82), (280, 149))
    d.arrow((512, 82), (512, 149))
    d.arrow((195, 181), (221, 181))
    d.arrow((397, 181), (424, 181))
    d.arrow((512, 212), (512, 234))
    d.arrow((411, 285), (411, 329))
    d.arrow((310, 370), (310, 384))
    return d


def linear() -> SvgDrawing:
    """Draw the products of the parts of two float32 numbers."""
    d = SvgDrawing(620, 350, "A float32 product from three bfloat16 parts")
    d.text(314, 28, "parts of a weight", "small")
    d.text(20, 68, "parts of an input", "small", "start")
    names = ("high", "middle", "low")
    d.frame(120, 82, 388, 190, "")
    for i, name in enumerate(names):
        d.box(128 + 126 * i, 40, 120, 34, name)
        d.box(20, 90 + 60 * i, 90, 54, name)
        for j, other in enumerate(names):
            text, kind = (f"{name} x {other}", "blue") if i + j <= 2 else ("left out", "")
            d.box(128 + 126 * j, 90 + 60 * i, 120, 54, text, kind=kind)
    d.box(128, 296, 372, 40, "float32 tile: six products, in a fixed order", kind="green")
    d.arrow((314, 272), (314, 295))
    for i, line in enumerate(("the three that", "are left out: at", "most 2^-24 of", "the result")):
        d.text(516, 180 + 16 * i, line, "small", "start")
    return d


def scalar() -> SvgDrawing:
    """Draw the levels of an element, and the halves of the bits of a code."""
    d = SvgDrawing(620, 400, "Levels by thresholds, and probabilities by halves of the bits")
    d.frame(10, 12, 600, 186, "FSQ: an element with five levels")
    ends = (30, 158, 254, 350, 446, 574)
    for level, (left, right) in enumerate(pairwise(ends)):
        value = f"value {(level - 2) / 2:g}"
        d.box(left, 94, right - left, 48, f"level {level}", value, kind="green")
    d.arrow((20, 76), (596, 76))
    d.text(588, 66, "z", "small", "start")
    for i, x in enumerate(ends[1:-1], 1):
        d.arrow((x, 58), (x, 92))
        d.text(x, 54, f"threshold {i}", "small")
    d.text(302, 164, "level = number of thresholds that z reaches", "small")
    d.text(302, 184, "index = sum over the elements of level x factor", "small")
    d.frame(10, 212, 600, 176, "LFQ: the probabilities of the codes of d bits")
    d.box(30, 246, 190, 54, "higher half of the bits", "2^(d/2) probabilities", kind="blue")
    d.box(30, 316, 190, 54, "lower half of the bits", "2^(d/2) probabilities", kind="blue")
    d.box(
        300,
        262,
        280,
        90,
        "2^d products",
        "formed for a block of rows,",
        "added up, never stored",
        kind="orange",
    )
    d.arrow((220, 273), (299, 290))
    d.arrow((220, 343), (299, 326))
    return d


def vq_layer() -> SvgDrawing:
    """Draw the forward and the backward pass of a VQ layer."""
    d = SvgDrawing(620, 450, "The forward and the backward pass of a VQ layer")
    d.frame(10, 10, 600, 215, "forward: one pass over x")
    d.box(20, 45, 170, 50, "x", "read: 67 MB")
    d.box(225, 45, 170, 50, "exact search", "of a block of rows", kind="blue")
    d.box(430, 45, 170, 50, "quantized", "written: 67 MB", kind="green")
    d.box(225, 130, 170, 78, "of each codeword", "number and sum", "of its rows", kind="orange")
    d.box(430, 130, 170, 78, "loss", "(x - q)^2, added in", "one order", kind="green")
    d.box(20, 130, 170, 78, "codebook", "moving average:", "sum / number", kind="green")
    d.arrow((190, 70), (224, 70))
    d.arrow((395, 70), (429, 70))
    d.arrow((310, 95), (310, 129))
    d.arrow((380, 95), (380, 112), (515, 112), (515, 129))
    d.arrow((225, 169), (191, 169))
    d.frame(10, 240, 600, 200, "backward: one pass, no search")
    d.box(20, 272, 170, 50, "x", "read: 67 MB")
    d.box(20, 332, 170, 50, "gradient of quantized", "read: 67 MB")
    d.box(225, 295, 170, 62, "in closed form", "g + 2 beta (x - q) / M", kind="blue")
    d.box(430, 295, 170, 62, "gradient of x", "written: 67 MB", kind="green")
    d.box(430, 380, 170, 50, "gradient of c", "2 (n c - s) / M", kind="green")
    d.box(20, 392, 170, 38, "number n, sum s", kind="orange")
    d.arrow((190, 297), (207, 297), (207, 315), (224, 315))
    d.arrow((190, 357), (207, 357), (207, 337), (224, 337))
    d.arrow((395, 326), (429, 326))
    d.arrow((190, 411), (429, 411))
    return d


def resident_network() -> SvgDrawing:
    """Draw the one network in which all clients train."""
    d = SvgDrawing(620, 430, "A round with one resident network")
    d.box(20, 20, 270, 50, "shared model", "one flat tensor", kind="blue")
    d.box(350, 20, 250, 50, "images of the client", "uint8, normalized by batch")
    d.frame(10, 95, 600, 235, "for each client in turn")
    d.box(20, 130, 270, 62, "resident network", "its weights are views of one flat tensor", kind="green")
    d.box(350, 130, 250, 62, "measure the shared model", "passes run only through the head", kind="green")
    d.box(350, 250, 250, 62, "train: forward, backward, step", "76 % of it in convolutions", kind="green")
    d.box(20, 250, 270, 62, "check: one read of the update", "finite, and its largest element", kind="orange")
    d.box(20, 355, 270, 56, "running sum", "weight times update, in place", kind="blue")
    d.arrow((200, 70), (200, 129))
    d.text(210, 114, "one copy", "small", "start")
    d.arrow((475, 70), (475, 129))
    d.arrow((290, 161), (349, 161))
    d.arrow((475, 192), (475, 249))
    d.arrow((350, 281), (291, 281), label="update")
    d.arrow((155, 312), (155, 354))
    d.text(350, 380, "After the last client, the running sum", "small", "start")
    d.text(350, 396, "is the average: the next model.", "small", "start")
    return d


def learning_from_sets() -> SvgDrawing:
    """Draw the loss of learning from sets and its gradient."""
    d = SvgDrawing(620, 370, "The loss of learning from sets, with its gradient")
    d.box(20, 20, 180, 50, "log A[target]", "transition to the set")
    d.box(220, 20, 180, 50, "logits z of a row", "K classes, read once")
    d.box(420, 20, 180, 50, "log marginal", "sum over all sets")
    d.frame(10, 95, 600, 175, "forward")
    d.box(20, 130, 280, 50, "log sum exp of z + log A[target]", "one exponential per class", kind="blue")
    d.box(320, 130, 280, 50, "log sum exp of z + log marginal", "the same exponentials", kind="blue")
    d.box(20, 210, 280, 44, "loss: the difference", kind="green")
    d.box(320, 210, 280, 44, "gradient, written in the same pass", kind="green")
    d.box(320, 310, 280, 44, "backward: times a number per row", kind="green")
    d.arrow((110, 70), (110, 129))
    d.arrow((260, 70), (260, 129))
    d.arrow((360, 70), (360, 129))
    d.arrow((510, 70), (510, 129))
    for x0, x1 in ((110, 110), (230, 400), (390, 220), (510, 510)):
        d.arrow((x0, 180), (x1, 209))
    d.arrow((460, 254), (460, 309))
    d.text(470, 292, "4 bytes per element", "small", "start")
    return d


DRAWINGS = (
    search_gpu,
    kmeans_cpu,
    kmeans_gpu,
    mc_dropout_cpu,
    mc_dropout_gpu,
    linear,
    scalar,
    vq_layer,
    resident_network,
    learning_from_sets,
)
