"""Tables of trained models from records: the order of tasks, and what was spent on pretraining."""

from report_runs import write_lra, write_pretraining

from nystromformer.records import read_records
from nystromformer.report.tables import lra_tables, pretraining_tables


def test_tasks_that_the_paper_does_not_have_come_last(tmp_path):
    runs = [write_lra(tmp_path / task, task=task) for task in ("of-mine", "text", "listops")]
    accuracies, what_was_run = lra_tables(read_records(*runs))
    assert accuracies.header == ("attention", "listops", "text", "of-mine", "average")
    assert [row[0] for row in what_was_run.rows] == ["listops", "text", "of-mine"]


def test_what_all_runs_of_a_task_share_does_not_tear_rows_apart(tmp_path):
    usual = [write_lra(tmp_path / task, task=task) for task in ("listops", "text")]
    pictures = {"task": "pathfinder", "self_pretrain": 500, "conv_kernel_size": 65}
    runs = [*usual, write_lra(tmp_path / "pathfinder", **pictures)]
    accuracies, what_was_run = lra_tables(read_records(*runs))
    assert [row[0] for row in accuracies.rows] == ["nystrom-64", "most frequent class"]
    departures = {row[0]: row[what_was_run.header.index("departures")] for row in what_was_run.rows}
    assert departures["listops"] == "–"
    assert departures["pathfinder"] == "kernel 65"
    scratch = write_lra(tmp_path / "scratch", task="pathfinder", conv_kernel_size=65)
    accuracies, _ = lra_tables(read_records(*runs, scratch))
    assert [row[0] for row in accuracies.rows] == ["nystrom-64", "nystrom-64 (self-pretrained)", "most frequent class"]


def test_an_attention_is_said_to_have_no_seeds_but_its_own(tmp_path):
    seeds = {"standard": (0,), "nystrom-64": (0, 1), "linear": (0,)}
    runs = [write_lra(tmp_path / f"{name}-{seed}", name, seed=seed) for name, own in seeds.items() for seed in own]
    _, what_was_run = lra_tables(read_records(*runs))
    assert [row[-2:] for row in what_was_run.rows] == [("standard, linear", "0"), ("nystrom-64", "0, 1")]


def test_other_data_than_the_papers_does_not_stand_beside_its_numbers(tmp_path):
    records = list(read_records(write_lra(tmp_path, task="listops")))
    assert "(37.15)" in lra_tables(records)[0].markdown()
    other = write_lra(tmp_path / "other", task="listops", data_departures=["64 to 256 tokens"])
    apart = lra_tables(read_records(other))[0]
    assert "(" not in "".join(cell for row in apart.rows for cell in row)
    assert "paper" not in apart.markdown()
    table, _ = lra_tables([*records, *read_records(other)])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["nystrom-64"] == ("36.00 (37.15)", "– (58.95)")
    assert rows["nystrom-64 (64 to 256 tokens)"] == ("36.00", "–")  # not another seed of the same


def test_other_data_of_one_task_leaves_the_others_beside_the_papers(tmp_path):
    runs = [write_lra(tmp_path / "text", task="text")]
    runs += [write_lra(tmp_path / "listops", task="listops", data_departures=["64 to 256 tokens"])]
    table, what_was_run = lra_tables(read_records(*runs))
    assert table.rows[0] == ("nystrom-64", "36.00", "36.00 (65.52)", "–")
    departures = {row[0]: row[what_was_run.header.index("departures")] for row in what_was_run.rows}
    assert departures == {"listops": "64 to 256 tokens", "text": "–"}


def test_pretraining_shows_what_was_spent(tmp_path):
    runs = [write_pretraining(tmp_path / "a"), write_pretraining(tmp_path / "b", end=False)]
    (table,) = pretraining_tables(read_records(*runs))
    (row,) = table.rows  # a run that is not finished has none
    assert row[1:6] == ("from scratch, mini", "20.0%", "70.0%", "20", "16 × 512")
    assert row[6:] == ("2.00 M", "20.0 min", "1,667", "10.0 M")
    assert pretraining_tables([]) == []
