"""What the bench of prefill and decode in different engines reports, from what it has measured."""

from bench.disaggregated import SYSTEMS, Load, Measured, _engines, rows_of


def test_rows_sum_up_runs_and_not_all_gaps_together():
    runs = [Measured([0.1, 0.3, 0.2], [i / 1000 for i in range(101)]), Measured([0.5], [0.02] * 10)]
    rows = {row.metric: row for row in rows_of("one_engine", str(Load(2, 3, 4)), runs)}
    assert (rows["ttft_p50"].min, rows["ttft_p50"].max, rows["ttft_p50"].runs) == (0.2, 0.5, 2)
    assert (rows["time_between_tokens_p95"].min, rows["time_between_tokens_p95"].max) == (0.02, 0.095)
    assert rows["time_between_tokens_max"].max == 0.1
    assert {row.setting for row in rows.values()} == {"streams=2 prompts=3 prompt_tokens=4 apart_s=1"}


def test_every_system_has_the_same_cores(tmp_path):
    for name in SYSTEMS:
        engines = _engines(name, 4, tmp_path)
        assert sum(int(arguments[arguments.index("--threads") + 1]) for _, arguments in engines) == 4
        offered = [a[a.index("--kv-listen") + 1] for _, a in engines if "--kv-listen" in a]
        assert offered == [a[a.index("--kv-peer") + 1] for _, a in engines if "--kv-peer" in a]
