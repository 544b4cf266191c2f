import json
import re
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from PIL import Image

from uefl.errors import UserError
from uefl.report import plots, style
from uefl.report.compare import differing_keys, repeated, spread_table
from uefl.report.events import event_writer
from uefl.report.run_folder import read_run, summarize
from uefl.report.tables import arm_table, client_tables, protocol_table, rejected_table
from uefl.report.write import write_report
from uefl.text_table import Table

from . import sample_runs

PICTURES = ("arms", "accuracy", "entropy", "reliability", "classes", "confusion")


def rejected(rounds):
    place = {"arm": "uefl", "iteration": 0, "client": "silo-1"}
    return [place | {"round": round, "reason": "a | b [red]"} for round in rounds]


def column(table: Table, name: str) -> list[str]:
    return [row[table.header.index(name)] for row in table.rows]


def test_read_run_gives_clients_in_order_and_metrics_as_matrices(tmp_path):
    run = read_run(sample_runs.write(tmp_path))
    assert run.measured_clients == ["silo-0", "silo-1", "silo-2"]
    assert list(run.arms) == ["fedavg", "uefl"]
    assert run.finished
    expected = 0.3 + 0.1 * np.arange(4)[:, None] + 0.01 * np.arange(3)
    np.testing.assert_allclose(run.series("uefl", "accuracy"), expected)
    assert np.isnan(run.series("fedavg", "perplexity")).all()


def test_folder_of_another_version_is_an_error(tmp_path):
    config = sample_runs.write(tmp_path) / "config.toml"
    config.write_text('arms = ["fedavg"]\nwidth = 64\n')
    with pytest.raises(UserError, match=r"config.toml .*\[run\]"):
        read_run(tmp_path)


def test_summarize_averages_over_clients_and_four_rounds():
    lines = sample_runs.records()
    for line in lines:  # a fifth round before the others must not count
        line["round"] += 1
    lines = [
        line | {"round": 0, "accuracy": 0.0} for line in lines if line["round"] == 1 and line["arm"] == "uefl"
    ] + [line for line in lines if line["arm"] == "uefl"]
    uefl = summarize(lines, columns={"uefl": ("perplexity", "codewords")})["uefl"]
    assert uefl["rounds"] == 5
    assert uefl["accuracy"] == pytest.approx(0.61)
    assert uefl["perplexity"] == pytest.approx(4.0)
    assert uefl["accuracy_last4"]["mean"] == pytest.approx(0.46)
    assert uefl["accuracy_last4"]["sd"] == pytest.approx(np.std([0.3, 0.4, 0.5, 0.6], ddof=1))
    assert uefl["clients"]["silo-2"] == {
        "accuracy": pytest.approx(0.62),
        "entropy": pytest.approx(0.7),
        "perplexity": 5.0,
        "codewords": 8,
    }


def test_tables_show_a_dash_for_missing_metrics(tmp_path):
    run = read_run(sample_runs.write(tmp_path))
    arms = arm_table(run)
    assert column(arms, "accuracy") == ["0.410", "0.610"]
    assert column(arms, "last 4 rounds") == ["0.260 ± 0.129", "0.460 ± 0.129"]
    assert column(arms, "perplexity") == ["-", "4"]
    run.arms["uefl"]["rounds"] = 2
    assert column(arm_table(run), "last 4 rounds or fewer") == ["0.260 ± 0.129", "0.460 ± 0.129"]
    assert column(arms, "codewords") == ["-", "5.333"]
    assert column(protocol_table(run), "seconds") == ["1.5", "1.5"]
    clients = {table.header[0].split()[0]: table for table in client_tables(run)}
    assert column(clients["accuracy"], "uefl") == ["0.600", "0.610", "0.620"]
    assert column(clients["codewords"], "uefl") == ["4", "4", "8"]
    assert "fedavg" not in clients["codewords"].header


def test_spread_over_runs_excludes_unfinished_runs(tmp_path):
    def shifted(by):
        return [line | {"accuracy": line["accuracy"] + by} for line in sample_runs.records()]

    runs = [
        read_run(sample_runs.write(tmp_path / str(i), shifted(by), seed=i))
        for i, by in enumerate((0.0, 0.02))
    ]
    unfinished = read_run(sample_runs.write(tmp_path / "open", shifted(0.3), finished=False))
    table = spread_table([*runs, unfinished])
    assert table.rows[1] == ["uefl", "2", "0.470", "0.014"]
    assert spread_table(runs[:1]).rows[1] == ["uefl", "1", "0.460", "-"]


@pytest.mark.parametrize(("rounds", "name"), [(1, "last round"), (3, "last 3 rounds"), (4, "last 4 rounds")])
def test_the_mean_over_rounds_names_their_number(tmp_path, rounds, name):
    run = write_report(
        sample_runs.write(tmp_path, [line for line in sample_runs.records() if line["round"] < rounds])
    )
    assert arm_table(run).header[2] == name
    assert f"{name}: mean ± " in arm_table(run).note
    assert spread_table([run]).header[2] == f"accuracy, {name}"


def test_a_run_that_repeats_another_is_found(tmp_path):
    runs = [
        read_run(sample_runs.write(tmp_path / name, **keys))
        for name, keys in {"a": {}, "b": {"threads": 2}, "c": {"seed": 1}}.items()
    ]
    assert repeated(runs) == {tmp_path / "b": tmp_path / "a"}


def test_a_folder_of_runs_is_not_a_run(tmp_path):
    sample_runs.write(tmp_path / "a")
    with pytest.raises(UserError, match=rf"config\.toml; .* as {tmp_path}/\*"):
        read_run(tmp_path)


@pytest.mark.parametrize("clients", [1, 3])
def test_the_legend_of_the_colors_is_not_cut_off(tmp_path, clients):
    run = read_run(sample_runs.write(tmp_path, sample_runs.records(clients=clients)))
    figure = plots._draw_shares(run, "uefl", run.findings["uefl"].shares)
    figure.draw_without_rendering()
    label = figure.axes[1].yaxis.label.get_window_extent()
    assert 0 <= label.y0 < label.y1 <= figure.bbox.height


def test_runs_may_differ_only_in_the_seed(tmp_path):
    first, second = (read_run(sample_runs.write(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    other = read_run(sample_runs.write(tmp_path / "other", gamma=0.7))
    assert differing_keys([first, second]) == []
    assert differing_keys([first, other]) == ["arms.uefl.gamma"]


def test_runs_with_different_arms_name_only_shared_arm_keys(tmp_path):
    arms = {"a": ("fedavg",), "b": ("fedavg", "uefl"), "c": ("uefl",)}
    a, b, c = (
        read_run(sample_runs.write(tmp_path / name, sample_runs.records(names)))
        for name, names in arms.items()
    )
    assert differing_keys([a, c]) == differing_keys([a, b, c]) == ["different arms"]
    other = read_run(sample_runs.write(tmp_path / "other", sample_runs.records(("uefl",)), gamma=0.7, lr=0.5))
    assert differing_keys([a, b, other]) == ["training.lr", "arms.uefl.gamma", "different arms"]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    "clients", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 9, 13))], ids=str
)
def test_report_shows_every_picture_it_links(tmp_path, clients):
    lines = sample_runs.records(("fedavg", "one-codebook", "uefl"), clients)
    write_report(sample_runs.write(tmp_path, lines))
    text = (tmp_path / "report.md").read_text()
    links = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert links == [
        f"plots/{name}.png"
        for name in (PICTURES[0], "loss", *PICTURES[1:3], "usage-one-codebook", "usage-uefl", *PICTURES[3:])
    ]
    for link in links:
        with Image.open(tmp_path / link) as image:
            assert min(image.size) > 200
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20, f"{link} is blank"
    assert "Unfinished" not in text
    assert "rejected repl" not in text


def test_an_arm_without_a_metric_has_no_curve(tmp_path):
    lines = sample_runs.records()
    for line in lines:
        line["server_loss"] = 0.5 if line["arm"] == "uefl" else None
    run = read_run(sample_runs.write(tmp_path, lines))
    figure = plots._draw_arms(run, {"server_loss": "loss"})
    figure.draw_without_rendering()
    curves = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_xdata()) == 4]
    assert sum(np.isfinite(curve).all() for curve in curves) == 1


def test_curves_at_the_ends_of_the_scale_keep_off_the_frame(tmp_path):
    lines = sample_runs.records()
    for line in lines:
        line |= {"accuracy": 1.0, "entropy": 2.3026 if line["round"] < 2 else 0.0}
    run = read_run(sample_runs.write(tmp_path, lines))
    for figure in (
        plots._draw_arms(run),
        plots._draw_clients(run, "entropy"),
        plots._draw_many_clients(run, "accuracy"),
    ):
        figure.draw_without_rendering()
        for ax in (ax for ax in figure.axes if ax.axison):
            curves = [
                line for line in ax.lines if line.get_linestyle() != "None" and len(line.get_xdata()) == 4
            ]
            ends = [y for line in curves for y in ax.transData.transform(line.get_xydata())[:, 1]]
            half = max(line.get_linewidth() for line in curves) / 2 * figure.dpi / 72
            assert ax.bbox.y0 + half < min(ends)
            assert max(ends) < ax.bbox.y1 - half


@pytest.mark.parametrize("draw", [plots._draw_clients, plots._draw_many_clients])
def test_the_entropy_plot_shows_the_threshold_of_each_iteration(tmp_path, draw):
    lines = sample_runs.records()
    for line in lines:
        line["entropy"] += 9
        if line["arm"] == "uefl" and line["round"] in (1, 3):
            line["threshold"] = 9.5 + line["round"] / 10
    run = read_run(sample_runs.write(tmp_path, lines))
    ax = draw(run, "entropy").axes[-1]  # of the last client, or of uefl
    limits = [
        line.get_xydata().tolist()
        for line in ax.lines
        if line.get_linestyle() == "--" and line.get_linewidth() == plots._THIN
    ]
    assert limits == [[[0.5, 9.6], [2.5, 9.6]], [[2.5, 9.8], [4.5, 9.8]]]
    assert 9.4 < ax.get_ylim()[0] < 9.6
    assert 10 < ax.get_ylim()[1] < 10.2
    assert plots._levels(run, "accuracy", "uefl") == plots._levels(run, "entropy", "fedavg") == []


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_equal_arms_are_all_visible(tmp_path, count):
    """Each color has a share of the pixels of equal curves, and different arms have whole lines."""
    arms = ("fedavg", "uefl", *(f"arm-{i}" for i in range(count - 2)))
    lines = sample_runs.records(arms)
    for line in lines:
        line["accuracy"] = 0.1 * (line["round"] + 1)
    run = read_run(sample_runs.write(tmp_path, lines))
    figure = plots._draw_arms(run)
    figure.legends[0].remove()
    for ax in figure.axes:
        ax.set_axis_off()  # nothing but the lines
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[:, : int(figure.bbox.width // 2), :3].astype(int)
    found = [
        (np.abs(pixels - 255 * np.array(to_rgb(style.color(run, arm)))).max(-1) < 12).sum() for arm in arms
    ]
    assert min(found) > 0.4 * max(found) > 0
    assert style.shared({arm: np.arange(4.0) + i for i, arm in enumerate(arms)}) == []
    apart = [style.line(arms, arm) for arm in arms]
    assert len({str(own["linestyle"]) for own in apart}) == len({own["color"] for own in apart}) == count


def test_many_arms_differ_and_leave_room_for_their_curves():
    arms = [f"arm-{i}" for i in range(23)]
    looks = {(line["color"], str(line["linestyle"])) for line in (style.line(arms, arm) for arm in arms)}
    assert len(looks) == len(arms)
    heights = []
    for count in (2, 23):
        figure, axes = style.panels(3, 3, 2.8, 1.75, above=0.7)
        style.legend(figure, style.handles(arms[:count]))
        FigureCanvasAgg(figure).draw()
        heights.append(axes[0, 0].get_window_extent().height)
    assert heights[1] > 0.7 * heights[0]


def test_equal_arms_share_a_line_in_rounds_where_they_agree(tmp_path):
    run = read_run(sample_runs.write(tmp_path, sample_runs.records(("fedavg", "one-codebook", "uefl"))))
    curves = {
        "fedavg": np.array([0.0, 0.1, 0.2, 0.3, 0.3, 0.4]),
        "one-codebook": np.array([0.3, 0.4, 0.5, 0.6, 0.3, 0.4]),
        "uefl": np.array([0.3, 0.4, 0.5, 0.9, 0.9]),
    }
    assert style.shared(curves) == [(("one-codebook", "uefl"), 0, 3), (("fedavg", "one-codebook"), 4, 6)]
    ax = style.canvas(4, 3).subplots()
    style.draw(ax, run, curves)
    whole, striped = ax.lines[:3], ax.lines[3:]
    assert [(line.get_color(), line.get_ydata().tolist()) for line in whole] == [
        (style.color(run, a), list(c)) for a, c in curves.items()
    ]
    entries = style.handles(run.arms)  # of the legend
    assert [line.get_linestyle() for line in whole] == [entry.get_linestyle() for entry in entries]
    assert [line.get_xdata().tolist() for line in striped] == [[1, 2, 3], [1, 2, 3], [5, 6], [5, 6]]


@pytest.mark.parametrize("validation", [True, False])
def test_the_report_explains_its_columns(tmp_path, validation):
    lines = sample_runs.records(("fedul",))
    for line in lines if validation else []:
        line["validation_accuracy"] = line["accuracy"]
    write_report(sample_runs.write(tmp_path, lines))
    text = (tmp_path / "report.md").read_text()
    assert ("| selected |" in text, "Selected:" in text) == (validation, validation)


def test_the_report_lists_the_codebooks_of_unseen_clients(tmp_path):
    """The accuracy is of the last round, and an arm without codebooks has none."""
    lines = sample_runs.records()
    for line in [line for line in lines if line["client"] == "silo-2"]:
        line["unseen"] = True
        if line["arm"] == "uefl":
            line |= {"accuracy_union": line["accuracy"] - 0.11, "accuracy_best": line["accuracy"] + 0.11}
    table = arm_table(read_run(sample_runs.write(tmp_path, lines)))
    assert column(table, "accuracy_union") == ["-", "0.51"]
    assert column(table, "accuracy_best") == ["-", "0.73"]
    write_report(tmp_path)
    assert "`accuracy_union`: " in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_report_is_rewritten_with_the_same_bytes(tmp_path):
    sample_runs.write(tmp_path)
    files = [tmp_path / name for name in ("report.md", "plots/accuracy.png")]
    first, second = ([write_report(tmp_path), *(file.read_bytes() for file in files)] for _ in range(2))
    assert first == second


def test_rejected_updates_come_before_the_numbers(tmp_path):
    write_report(sample_runs.write(tmp_path, [*rejected((0, 1, 3)), *sample_runs.records()]))
    text = (tmp_path / "report.md").read_text()
    assert text.index("uefl: 3 rejected replies") < text.index("| arm |")
    assert "| arm | client | rounds | times | why |" in text
    assert r"| uefl | silo-1 | 1-2, 4 | 3 | a \| b \[red\] |" in text


@pytest.mark.parametrize("finished", [True, False])
def test_rejected_replies_are_no_records_of_a_round(tmp_path, finished):
    lines = sample_runs.records()
    plain = read_run(sample_runs.write(tmp_path / "plain", lines, finished=finished))
    run = read_run(
        sample_runs.write(
            tmp_path / "run", [*lines[:3], *rejected((0, 1)), *lines[3:], *rejected((3,))], finished=finished
        )
    )
    assert run.records == plain.records
    assert [line["round"] for line in run.rejected] == [1, 2, 4]
    assert run.arms["uefl"] == plain.arms["uefl"] | {"rejected": 3, "reasons": {"a | b [red]": 3}}
    assert run.arms["fedavg"] == plain.arms["fedavg"]
    assert run.arms["fedavg"]["rejected"] == 0
    assert rejected_table(plain) is None


def test_the_report_truncates_a_long_list_of_rejected_replies(tmp_path):
    lines = [line | {"client": f"c{i}"} for i in range(60) for line in rejected((0,))]
    write_report(sample_runs.write(tmp_path, [*lines, *sample_runs.records()]))
    text = (tmp_path / "report.md").read_text()
    assert "10 more rows" in text
    assert "| c49 |" in text
    assert "| c50 |" not in text


def test_a_silo_may_be_called_anything(tmp_path):
    lines = [line | {"client": "a|b $x_$ [red]"} for line in sample_runs.records(clients=1)]
    run = write_report(sample_runs.write(tmp_path, lines))
    assert r"| a\|b \$x\_\$ \[red\] |" in (tmp_path / "report.md").read_text()
    assert [str(cell) for cell in client_tables(run)[0].rich().columns[0].cells] == ["a|b $x_$ [red]"]


def test_unfinished_run_is_reported_from_its_whole_rounds(tmp_path):
    lines = sample_runs.records()
    sample_runs.write(tmp_path, lines[:-2], finished=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(lines[-2])[:40])  # being written right now
    run = write_report(tmp_path)
    assert not run.finished
    assert run.arms["uefl"]["rounds"] == 3
    assert "(unfinished)" in arm_table(run).title
    assert column(protocol_table(run), "seconds") == ["-", "-"]
    assert f"uefl train --resume {tmp_path}" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl"])
def test_a_folder_that_is_no_run_is_named_with_what_it_lacks(tmp_path, missing):
    sample_runs.write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=f"{tmp_path} .*{missing}"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "line", ['{"arm": "uefl"', "[1, 2]", '{"arm": "uefl"}'], ids=["torn", "no-object", "keys-missing"]
)
def test_damaged_metrics_name_the_file_and_the_line(tmp_path, line):
    sample_runs.write(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:4], line, ""]))
    with pytest.raises(UserError, match=f"{path}, line 5 "):
        write_report(tmp_path)
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize("value", ["x", [], {}, None, float("nan"), 10**400], ids=repr)
@pytest.mark.parametrize("key", ["arm", "client", "round", "accuracy", "bytes_sent"])
def test_metrics_that_were_edited_are_refused(tmp_path, key, value):
    if (key == "accuracy" and value is None) or (key in ("arm", "client") and value == "x"):
        pytest.skip("a value that a run may write")
    sample_runs.write(tmp_path, finished=False)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {key: value})
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(UserError, match=f"{path}, line 2 "):
        read_run(tmp_path)


def edited(path, change):
    """Write a run folder in which a function has changed the lines of metrics.jsonl."""
    sample_runs.write(path, finished=False)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perplexity", [1, 2]),
        ("train_loss", "low"),
        ("codewords", {"a": 1}),
        ("accuracy", 7),
        ("train_accuracy", "x"),
        ("holdout_accuracy", 1.5),
        ("entropy", -1),
        ("confusion", [1, 2, 3]),
        ("confusion", [1, "x", 3, 4]),
        ("reliability", [1, 2, 3]),
        ("confidence", None),
        ("arm", "other"),
    ],
)
def test_values_that_no_run_writes_are_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 12 "):
        read_run(edited(tmp_path, lambda lines: [*lines[:11], lines[11] | {key: value}, *lines[12:]]))


def test_counts_of_clients_have_equal_lengths(tmp_path):
    def shorter(lines):
        return [*lines[:-1], lines[-1] | {"confusion": [1, 2, 3, 4]}]

    with pytest.raises(UserError, match=r"metrics\.jsonl, line 24 "):
        read_run(edited(tmp_path, shorter))


def test_an_arm_has_a_client_that_trains(tmp_path):
    def unseen(lines):
        return [line | ({"unseen": True} if line["arm"] == "uefl" else {}) for line in lines]

    with pytest.raises(UserError, match=r"metrics\.jsonl .*'uefl'"):
        read_run(edited(tmp_path, unseen))


@pytest.mark.parametrize("usage", ["x", [], ["a"] * 4, [None] * 4, [1, 2]], ids=repr)
def test_other_metrics_may_have_any_type(tmp_path, usage):
    """An algorithm may record a text, a list or a dict."""
    more = {"note": "x", "parts": {"a": [1.5, None]}, "usage": usage}
    path = edited(tmp_path, lambda lines: [line | more for line in lines])
    assert read_run(path).records[0]["note"] == "x"
    write_report(path)
    more = {"parts": {"a": float("nan")}}
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1 "):
        read_run(edited(tmp_path, lambda lines: [line | more for line in lines]))


def test_lines_in_another_order(tmp_path):
    """A run that trains more rounds has lines of several arms in turn until its end."""
    whole = read_run(edited(tmp_path / "a", lambda lines: lines))
    moved = read_run(
        edited(tmp_path / "b", lambda lines: [*lines[:9], *lines[12:21], *lines[9:12], *lines[21:]])
    )
    assert moved.records == whole.records
    assert moved.arms == whole.arms


def test_records_without_the_marks_of_an_algorithm(tmp_path):
    def without(lines):
        return [{key: value for key, value in line.items() if key != "extended"} for line in lines]

    write_report(edited(tmp_path, without))


@pytest.mark.parametrize("key", ["accuracy", "best", "clients", "rounds", "bytes_sent", "accuracy_last4"])
@pytest.mark.parametrize("value", ["x", [], True, 0.9, 7, None], ids=repr)
def test_a_summary_that_was_edited_is_refused(tmp_path, key, value):
    sample_runs.write(tmp_path)
    path = tmp_path / "summary.json"
    summary = json.loads(path.read_text())
    next(iter(summary["arms"].values()))[key] = value
    path.write_text(json.dumps(summary))
    with pytest.raises(UserError, match=f"{path} "):
        read_run(tmp_path)


def test_a_summary_of_other_metrics_is_refused(tmp_path):
    path = sample_runs.write(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(UserError, match=r"summary\.json .*metrics\.jsonl"):
        read_run(tmp_path)
    path.write_text("".join(lines * 2))
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line {len(lines) + 1} "):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("summary", "message"),
    [("{", "summary"), ("[]", "summary"), ('{"schema": 9, "arms": {}}', r"schema 9, .*\b2\b")],
    ids=["torn", "no-object", "other-version"],
)
def test_damaged_summary_names_the_file(tmp_path, summary, message):
    sample_runs.write(tmp_path)
    (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(UserError, match=f"{tmp_path / 'summary.json'} .*{message}"):
        read_run(tmp_path)


def test_a_run_without_a_round_has_nothing_to_report(tmp_path):
    for finished, advice in ((False, ".*--resume"), (True, "(?!.*--resume)")):
        sample_runs.write(tmp_path, finished=finished)
        (tmp_path / "metrics.jsonl").write_text("")
        with pytest.raises(UserError, match=f"round{advice}"):
            read_run(tmp_path)


def test_events_have_means_and_clients_of_every_round(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = [line for line in sample_runs.records() if line["arm"] == "uefl"]
    with event_writer(tmp_path) as writer:
        for number in range(2):
            writer.round("uefl", number, [line for line in lines if line["round"] == number])
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("accuracy/uefl")] == [(0, 0.31), (1, 0.41)]
    assert [round(e.value, 5) for e in events.Scalars("accuracy uefl/silo-2")] == [0.32, 0.42]


def test_events_are_rewritten_from_metrics_on_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = [line for line in sample_runs.records() if line["arm"] == "fedavg"]
    (tmp_path / "events.out.tfevents.mine").mkdir()  # a folder has no events
    for known in (0, 6):  # killed when round 3 was in the events, but only rounds 1 and 2 in the metrics
        with event_writer(tmp_path, lines[:known]) as writer:
            for number in range(known // 3, 3):
                writer.round("fedavg", number, lines[3 * number : 3 * number + 3])
    (tmp_path / "events.out.tfevents.mine").rmdir()  # it is still there, and tensorboard cannot read it
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("accuracy/fedavg")] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_without_the_extra_there_is_no_writer(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with event_writer(tmp_path) as writer:
        assert writer is None
    assert list(tmp_path.iterdir()) == []
