"""The comparison with llama.cpp: cases, rounds, medians, report; the whole with engines that pretend."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mvllm.bench.peers import foreign_load, machine
from mvllm.bench.peers.bandwidth import ReadBandwidth
from mvllm.bench.peers.foreign_load import ForeignLoad
from mvllm.bench.peers.llama_cpp import main
from mvllm.bench.peers.peer_process import EngineProcess, PeerFailed
from mvllm.bench.peers.plot import in_panel, write_plot
from mvllm.bench.peers.report import command_line, report, start_table, table
from mvllm.bench.peers.results import Results, Start, Summary, summarize
from mvllm.bench.peers.rounds import Contest, Round, Timing, common_prefix
from mvllm.bench.peers.session import EngineCommand, Plan, bytes_read_per_step, measure
from mvllm.bench.peers.workloads import (
    DEFAULT_CASES,
    Case,
    parse_cases,
    prompts_of,
    text_token_ids,
    tokens_needed,
)
from mvllm.core.errors import ConfigError
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.text.tokenizer import Tokenizer
from tests.tiny_models import write_tiny_gguf

FAKE_ENGINE = Path(__file__).parent.parent / "models" / "measured_engine.py"


def round_of(
    ours: float = 20.0, theirs: float | None = 10.0, *, load: float | None = 0.0, case: str = "decode-128"
) -> Round:
    """One with these rates."""
    peer = None if theirs is None else Timing(100, 100 / theirs, load)
    return Round(case, Timing(100, 100 / ours, load), peer, 4e9, load)


# --- cases --------------------------------------------------------------------------------------------------


def test_cases_are_read_from_their_names() -> None:
    assert parse_cases("decode-2048, prefill-64,sequences-8") == [
        Case("decode", 1, 2048, 32),
        Case("prefill", 1, 64, 0),
        Case("decode", 8, 128, 16),
    ]
    assert [case.name for case in parse_cases("decode-2048,prefill-64,sequences-8")] == [
        "decode-2048",
        "prefill-64",
        "sequences-8",
    ]


def test_one_sequence_is_measured_once() -> None:
    names = [case.name for case in parse_cases(DEFAULT_CASES)]
    assert names.count("decode-128") == 1
    assert "sequences-1" not in names
    assert len(set(names)) == len(names) == 9


@pytest.mark.parametrize(
    "name", ["", "decode", "decode-", "decode-0", "prefill--1", "sequences-257", "x-1", "decode-²"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no case"):
        parse_cases(name)


def test_prompts_are_consecutive_and_hold_one_token_more_than_the_context_to_decode_after() -> None:
    [decode, prefill] = parse_cases("sequences-2,prefill-3")
    ids = list(range(tokens_needed([decode, prefill])))
    assert prompts_of(decode, ids) == [list(range(129)), list(range(129, 258))]
    assert prompts_of(prefill, ids) == [[0, 1, 2]]
    assert (decode.tokens, prefill.tokens) == (2 * 32, 3)


# --- rounds -------------------------------------------------------------------------------------------------


def test_the_load_of_a_round_is_its_largest_and_unknown_if_a_part_is() -> None:
    assert replace(round_of(load=0.1), bandwidth_foreign_load=0.3).foreign_load == 0.3
    assert round_of(theirs=None, load=0.1).foreign_load == 0.1
    assert replace(round_of(load=0.1), bandwidth_foreign_load=None).foreign_load is None


def test_a_common_prefix_ends_at_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([5], [6]) == 0


def test_foreign_load_is_what_is_busy_beyond_the_processes_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two seconds, in which the machine was busy for three and the process for 2.5.
    clock, busy, own = iter([10.0, 12.0]), iter([100.0, 103.0]), iter([50.0, 52.5])
    monkeypatch.setattr(foreign_load.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(foreign_load, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(ForeignLoad, "_own_seconds", lambda self: next(own))
    assert ForeignLoad([1]).measure() == pytest.approx(0.25)


def test_the_bandwidth_is_that_of_reading_the_array() -> None:
    with ReadBandwidth(threads=3, array_bytes=3 << 16) as bandwidth:
        assert bandwidth.read() == (3 << 16) // 8
        assert bandwidth.measure(seconds=0.0) > 0


# --- medians ------------------------------------------------------------------------------------------------


def test_ratios_are_taken_pair_by_pair() -> None:
    rounds = [round_of(10, 5), round_of(30, 10), round_of(20, 40), round_of(1, 1, case="prefill-64")]
    summary = summarize("decode-128", rounds, 0.2, weight_bytes=10**8)
    assert summary.ratio is not None
    assert (summary.ratio.median, summary.ratio.lowest, summary.ratio.highest) == (2.0, 0.5, 3.0)
    assert (summary.ours, summary.theirs) == (20, 10)
    assert summary.our_share == pytest.approx(20 * 1e8 / 4e9)
    assert summary.their_share == pytest.approx(10 * 1e8 / 4e9)


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    rounds = [round_of(10, 10), round_of(20, 40), round_of(30, 20)]
    summary = summarize("decode-128", rounds, 0.2, weight_bytes=1)
    assert summary.ratio is not None
    assert summary.ratio.median == 1.0
    assert (summary.ours, summary.theirs) == (20, 20)


def test_rounds_under_load_are_dropped_and_counted() -> None:
    rounds = [round_of(10, 10, load=0.2), round_of(90, 10, load=0.21), round_of(12, 10, load=None)]
    summary = summarize("decode-128", rounds, 0.2, weight_bytes=1)
    assert (summary.num_kept, summary.num_dropped) == (2, 1)
    assert summary.ours == 11
    assert summarize("decode-128", rounds[1:2], 0.2, weight_bytes=1) == Summary("decode-128", 0, 1)


def test_shares_of_bandwidth_are_of_one_sequence_and_each_of_its_own_round() -> None:
    rounds = [round_of(10, None), replace(round_of(20, None), bandwidth=1e9), replace(round_of(5, None))]
    assert summarize("decode-128", rounds, 0.2, 10**8).our_share == pytest.approx(10 * 1e8 / 4e9)
    batch = [replace(round, case="sequences-8") for round in rounds]
    assert summarize("sequences-8", batch, 0.2, 10**8).our_share is None


def test_agreement_is_the_worst_of_the_rounds() -> None:
    rounds = [replace(round_of(), same_tokens=same, num_tokens=32) for same in (32, 7, 20)]
    assert summarize("decode-128", rounds, 0.2, 1).same_tokens == (7, 32)


# --- the file -----------------------------------------------------------------------------------------------


def test_results_are_read_back(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.begin({"model": "a", "date": "today"})
    results.add(round_of())
    results.add(round_of(theirs=None, load=None))
    results.add_start(Start("mvllm", 1.5, None))
    again = Results(tmp_path / "results.json")
    again.begin({"model": "a", "date": "tomorrow"})
    assert (again.facts, again.rounds, again.starts) == (results.facts, results.rounds, results.starts)
    assert again.facts["date"] == "today"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("other", [{"model": "b"}, {}, {"model": "a", "peer": "c"}])
def test_results_of_something_else_are_refused(tmp_path: Path, other: dict[str, str]) -> None:
    results = Results(tmp_path / "results.json")
    results.begin({"model": "a"})
    results.add(round_of())
    with pytest.raises(ConfigError, match="give another file"):
        Results(tmp_path / "results.json").begin(other)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"facts": {}, "starts": [], "rounds": [{}]}'])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no results of this command"):
        Results(path)
    assert path.read_text() == content


# --- the report ---------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_case_measured_or_not() -> None:
    rounds = [replace(round_of(20, 10, load=0.05), same_tokens=31, num_tokens=32)]
    lines = table(
        [summarize("decode-128", rounds, 0.2, 10**8), summarize("prefill-64", [], 0.2, 10**8)]
    ).splitlines()
    assert lines[2] == (
        "| decode-128 | 20.0 | 10.0 | 2.00 (2.00 to 2.00) | 1 of 1 | 0.05 | 4.0 | 50% | 25% | 31 of 32 |"
    )
    assert lines[3] == "| prefill-64 |  |  |  | 0 of 0 |  |  |  |  |  |"


def test_loading_times_are_medians_and_memory_is_the_largest() -> None:
    starts = [Start("mvllm", 1.0, 1 << 20), Start("mvllm", 2.0, 3 << 20), Start("mvllm", 9.0, None)]
    assert "| mvllm | 2.00 | 3 | 3 |" in start_table([*starts, Start("llama.cpp", 0.5, None)])
    assert "| llama.cpp | 0.50 |  | 1 |" in start_table([*starts, Start("llama.cpp", 0.5, None)])


def test_a_report_says_how_it_was_made_without_naming_folders() -> None:
    text = report(
        {"model": "tiny.gguf", "build": "AVX = 1 | FMA = 1"},
        [summarize("decode-128", [round_of()], 0.3, 10**8)],
        [Start("mvllm", 1.0, None)],
        ["/home/someone/tiny.gguf", "--peer-python", "/opt/peer/bin/python", "--report=/tmp/out dir/x.md"],
        weight_bytes=123_000_000,
        sample_seconds=1.5,
        max_foreign=0.3,
        plot="tiny.svg",
    )
    assert text.startswith("# Beside llama.cpp: tiny.gguf\n")
    command = "python -m mvllm.bench.peers.llama_cpp tiny.gguf --peer-python python --report=x.md"
    assert f"```console\n{command}\n```" in text
    assert "](tiny.svg)" in text
    assert "| build | AVX = 1 , FMA = 1 |" in text
    for stated in ("at least 1.5 s", "above\n  0.3 are dropped", "(123 MB)", "after 128 different tokens"):
        assert " ".join(stated.split()) in " ".join(text.split())
    assert "/opt" not in text
    assert "/home" not in text


def test_words_of_the_command_are_quoted() -> None:
    assert command_line(["a b.gguf"]).endswith("llama_cpp 'a b.gguf'")


def test_the_panel_of_sequences_begins_with_one() -> None:
    rounds = [round_of(case=name) for name in ("sequences-16", "sequences-2", "decode-128", "decode-2048")]
    summaries = [summarize(round.case, rounds, 0.2, 1) for round in rounds]
    summaries.append(Summary("sequences-4", 0, 3))
    assert [number for number, _ in in_panel(summaries, "sequences")] == [1, 2, 16]
    assert [number for number, _ in in_panel(summaries, "decode")] == [128, 2048]
    assert in_panel(summaries, "prefill") == []


def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summaries = [summarize("decode-128", [round_of()], 0.2, 1), summarize("prefill-64", [], 0.2, 1)]
    for name in ("a.svg", "b.svg"):
        write_plot(summaries, "tiny", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


# --- the pipe, with an engine that pretends ----------------------------------------------------------------


def start(**settings: object) -> EngineProcess:
    return EngineProcess("the fake", [sys.executable, "-I"], FAKE_ENGINE, settings)


def test_orders_are_carried_out_in_another_process() -> None:
    with start(facts={"version": "7"}) as engine:
        assert engine.facts == {"version": "7"}
        assert engine.load_seconds >= 0
        assert engine.ask(do="prefill", prompt=[1, 2, 3], repeats=2) == {"seconds": 6.0}
        assert engine.ask(do="prepare", prompts=[[1, 2], [3, 4]], steps=3) == {}
        assert engine.ask(do="decode", repeats=2) == {"seconds": 6.0, "token_ids": [3, 4, 5]}
        peak = engine.peak_rss_bytes()
        assert peak is None or peak > 1 << 20


def test_what_an_engine_prints_does_not_reach_the_pipe() -> None:
    with start(prints="not JSON") as engine:
        assert engine.ask(do="prefill", prompt=[1], repeats=1) == {"seconds": 1.0}


def test_an_error_is_reported_and_the_engine_goes_on() -> None:
    with start() as engine:
        with pytest.raises(PeerFailed, match="the fake: RuntimeError: the prompt is empty"):
            engine.ask(do="prefill", prompt=[], repeats=1)
        with pytest.raises(PeerFailed, match="unknown order 'dance'"):
            engine.ask(do="dance")
        assert engine.ask(do="prefill", prompt=[1], repeats=1) == {"seconds": 1.0}


def test_an_engine_that_ends_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    with start() as engine:
        with pytest.raises(PeerFailed, match="ended with status 3"):
            engine.ask(do="prefill", prompt=[-1], repeats=1)
        with pytest.raises(PeerFailed, match="ended with status 3"):
            engine.ask(do="prefill", prompt=[1], repeats=1)
    with pytest.raises(PeerFailed, match="ended with status 1; what it said stands above"):
        start(fails="no such model")
    assert "no such model" in capfd.readouterr().err


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerFailed, match="can't be started with /no/python"):
        EngineProcess("the fake", ["/no/python"], FAKE_ENGINE, {})


def test_closing_ends_the_process() -> None:
    engine = start()
    assert engine.status is None
    engine.close()
    assert engine.status == 0
    engine.close()


@pytest.fixture
def interrupt() -> Iterator[threading.Timer]:
    """Interrupts this thread a moment after it is started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = (threading.get_ident(), signal.SIGINT)
    yield threading.Timer(0.2, signal.pthread_kill, arguments)
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_an_engine_at_work(interrupt: threading.Timer) -> None:
    with pytest.raises(KeyboardInterrupt), start() as engine:
        interrupt.start()
        engine.ask(do="prefill", prompt=[-2], repeats=1)
    # By itself: it did not have to be killed.
    assert engine.status == 0


# --- sessions, with engines that pretend --------------------------------------------------------------------


def test_who_begins_changes_and_short_cases_are_repeated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    [case] = parse_cases("prefill-2")
    with start(log=str(log), name="a") as ours, start(log=str(log), name="b") as theirs:
        contest = Contest(case, ours, theirs, range(2), bandwidth=lambda: 7.0, own_pid=1, sample_seconds=3.0)
        rounds = [contest.round(number) for number in range(2)]
    assert log.read_text().split() == ["a:1", "b:1", "a:2", "b:2", "b:2", "a:2"]
    # Two tokens take two seconds each time.
    assert [(round.ours.tokens, round.ours.seconds, round.bandwidth) for round in rounds] == [
        (4, 4.0, 7.0)
    ] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, tensor_type="F32", seed=3)
    return path


def plan_for(model: Path, cases: str, **changes: object) -> Plan:
    plan = Plan(model, 1, tuple(parse_cases(cases)), 2, 0.0, 1e9, None)
    return replace(plan, **changes)  # type: ignore[arg-type]


def fake_commands(*names: str, **settings: object) -> list[EngineCommand]:
    more: Mapping[str, object] = {"facts": {"version": "7"}, **settings}
    return [EngineCommand(name, (sys.executable, "-I"), FAKE_ENGINE, more) for name in names]


def test_a_session_measures_what_is_missing_and_nothing_else(model: Path, tmp_path: Path) -> None:
    checkpoint, file = load_checkpoint(model), tmp_path / "results.json"
    told: list[Round] = []
    plan = plan_for(model, "decode-16,prefill-8")
    measure(
        plan_for(model, "prefill-8"), fake_commands("ours", "theirs"), checkpoint, Results(file), told.append
    )
    assert [round.case for round in told] == ["prefill-8"] * 2
    results = Results(file)
    assert plan.missing(results) == 2
    measure(plan, fake_commands("ours", "theirs"), checkpoint, results, told.append)
    assert [round.case for round in told[2:]] == ["decode-16"] * 2
    assert [(round.same_tokens, round.num_tokens) for round in told[2:]] == [(32, 32)] * 2
    assert results.facts["theirs: version"] == "7"
    assert [start.engine for start in results.starts] == ["ours", "theirs"] * 2
    assert plan.missing(results) == 0
    measure(plan, fake_commands("nobody", fails="not started"), checkpoint, results, told.append)
    assert len(told) == 4
    assert [asdict(round) for round in Results(file).rounds] == [asdict(round) for round in told]


def test_a_session_ends_when_time_or_tries_are_used_up(model: Path) -> None:
    checkpoint, results = load_checkpoint(model), Results()
    plan = plan_for(model, "prefill-8", max_foreign=-1.0)
    measure(plan, fake_commands("ours"), checkpoint, results, lambda _: None)
    if results.rounds[0].foreign_load is not None:
        assert (len(results.rounds), plan.missing(results)) == (4, 2)
    late = replace(plan, seconds=-1.0)
    results = Results()
    measure(late, fake_commands("ours"), checkpoint, results, lambda _: None)
    assert results.rounds == []


def test_a_case_beyond_the_models_context_is_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode-512 takes .* the model's context is 512"):
        measure(
            plan_for(model, "decode-512"),
            fake_commands("nobody", fails="not started"),
            load_checkpoint(model),
            Results(),
            lambda _: None,
        )


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_but_an_embedding_that_is_not_the_head(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    shape = write_tiny_gguf(path, tensor_type="F32", seed=3, tied=tied)
    checkpoint = load_checkpoint(path)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors)
    embedding = shape.vocab * shape.hidden * 4
    assert bytes_read_per_step(checkpoint.weights) == total - (0 if tied else embedding)


def test_the_text_has_as_many_tokens_as_are_asked_for(model: Path) -> None:
    tokenizer = Tokenizer.from_assets(load_checkpoint(model).text)
    ids = text_token_ids(tokenizer, 300)
    assert len(ids) == 300
    assert len(set(ids)) > 20


# --- the command --------------------------------------------------------------------------------------------


def test_our_engine_alone_is_measured_and_reported(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = {
        **{"--cases": "decode-32,prefill-20,sequences-2", "--rounds": "1", "--sample-seconds": "0"},
        **{"--max-foreign": "1000", "--threads": "1", "--json": str(tmp_path / "results.json")},
        **{"--report": str(tmp_path / "report.md"), "--plot": str(tmp_path / "plot.svg")},
    }
    words = [str(model), "--no-peer", *(word for option in options.items() for word in option)]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = (tmp_path / "report.md").read_text()
    for name in ("decode-32", "prefill-20", "sequences-2"):
        assert f"| {name} |" in result.output
        assert f"| {name} |" in written
    assert "](plot.svg)" in written
    results = Results(tmp_path / "results.json")
    assert len(results.rounds) == 3
    # What was measured is what is tested, not another installation.
    assert results.facts["mvllm: sources"] == machine.sources()


def test_the_command_wants_a_peer_or_none(model: Path) -> None:
    for words in ([], ["--no-peer", "--peer-python", "python"]):
        result = CliRunner().invoke(main, [str(model), *words])
        assert result.exit_code == 2
        assert "either --peer-python or --no-peer" in result.output


def test_a_folder_that_does_not_exist_is_named_before_the_work(model: Path, tmp_path: Path) -> None:
    words = [str(model), "--no-peer", "--report", str(tmp_path / "no" / "report.md")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "does not exist" in result.output
