import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from rlvr_jax.rewards import VerifierPool, VerifierSpec
from rlvr_jax.types import Task
from tests.rewards import hostile

TASK = Task(id="1", domain="test", prompt=(), answer="42")
EXACT = VerifierSpec("exact")
HOSTILE = VerifierSpec(hostile.by_response)


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(2, timeout_s=1.0) as pool:
        yield pool


def judge(pool, *responses, spec=HOSTILE):
    return pool.score([(TASK, response, spec) for response in responses])


def test_verdicts_are_aligned_with_jobs(pool):
    responses = [str(i) for i in range(500)]
    assert [r.value for r in judge(pool, *responses)] == [float(i) for i in range(500)]


def test_a_missing_answer_does_not_shift_the_verdicts_after_it(pool):
    responses = [r"The answer is \boxed{42}", "I don't know.", r"The answer is \boxed{137}"]
    rewards = judge(pool, *responses, spec=VerifierSpec("math"))
    assert [(r.value, r.status) for r in rewards] == [(1.0, "ok"), (0.0, "ok"), (0.0, "ok")]


def test_jobs_of_several_verifiers_keep_their_order_names_and_weights(pool):
    specs = [VerifierSpec("exact", weight=0.7), VerifierSpec(hostile.length, weight=0.3)]
    rewards = pool.score([(TASK, "42", spec) for _ in range(50) for spec in specs])
    assert [r.name for r in rewards] == ["exact", "length"] * 50
    assert [r.value for r in rewards] == [1.0, 2.0] * 50
    assert [r.weight for r in rewards] == [0.7, 0.3] * 50


def test_no_jobs_give_no_verdicts(pool):
    assert pool.score([]) == []


@pytest.mark.parametrize("action", ["hang", "spin", "deaf", "stop"])
def test_a_hanging_verifier_times_out_and_costs_only_itself(pool, action):
    start = time.monotonic()
    rewards = judge(pool, *(["1"] * 5), action, *(["1"] * 5))
    assert [r.status for r in rewards] == ["ok"] * 5 + ["timeout"] + ["ok"] * 5
    assert [r.value for r in rewards] == [1.0] * 5 + [0.0] + [1.0] * 5
    assert "1 s" in rewards[5].detail
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("action", "detail"),
    [
        ("exit", "exited with code 3"),
        ("segfault", "SIGSEGV"),
        ("kill", "SIGKILL"),
        ("close", ""),
        ("raise", "ZeroDivisionError"),
        ("sys.exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("recurse", "RecursionError"),
        ("raise long", "ValueError: zzz"),
        ("raise unprintable", "Unprintable"),
        ("none", "NoneType"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("text", "str"),
        ("list", "list"),
        ("complex", "complex"),
        ("huge", "OverflowError"),
    ],
)
def test_a_verifier_that_breaks_is_failed_and_costs_only_itself(pool, action, detail):
    rewards = judge(pool, "1", action, "1")
    assert [(r.value, r.status) for r in rewards] == [(1.0, "ok"), (0.0, "failed"), (1.0, "ok")]
    assert detail in rewards[1].detail and len(rewards[1].detail) < 1000


def test_a_verifier_that_eats_memory_meets_its_limit():
    with VerifierPool(1, timeout_s=20.0, memory_bytes=1 << 30) as pool:
        rewards = judge(pool, "1", "memory", "1")
    assert [r.status for r in rewards] == ["ok", "failed", "ok"]
    assert "MemoryError" in rewards[1].detail


@pytest.mark.parametrize(
    ("action", "value"),
    [("true", 1.0), ("numpy", 0.5), ("numpy int", 1.0), ("numpy bool", 1.0)],
)
def test_numbers_of_other_types_are_scores(pool, action, value):
    [reward] = judge(pool, action)
    assert (type(reward.value), reward.value, reward.status) == (float, value, "ok")


def test_a_verifier_that_prints_a_lot_does_not_disturb_the_protocol(pool):
    assert [r.value for r in judge(pool, "print", "7")] == [0.5, 7.0]


def test_threads_that_a_verifier_leaves_do_not_keep_its_worker_from_closing():
    with VerifierPool(1) as pool:
        assert judge(pool, "thread")[0].value == 0.25
        start = time.monotonic()
    assert time.monotonic() - start < 1


def test_many_bad_jobs_each_get_their_own_verdict():
    with VerifierPool(2, timeout_s=0.3) as pool:
        responses = ["1", "exit", "hang", "raise", "2"] * 4
        statuses = [r.status for r in judge(pool, *responses)]
    assert statuses == ["ok", "failed", "timeout", "failed", "ok"] * 4


def test_what_a_timed_out_verifier_started_is_killed_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE_PID_FILE", str(tmp_path / "pid"))
    with VerifierPool(1, timeout_s=1.0) as pool:
        assert judge(pool, "child")[0].status == "timeout"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its verifier"
        time.sleep(0.05)


def test_workers_are_reused(pool):
    spec = VerifierSpec(hostile.process_id)
    ids = {r.value for _ in range(5) for r in pool.score([(TASK, "", spec)] * 8)}
    assert len(ids) <= pool.num_workers
    assert os.getpid() not in ids


def test_a_worker_killed_while_idle_costs_no_verdict():
    with VerifierPool(1) as pool:
        spec = VerifierSpec(hostile.process_id)
        worker = psutil.Process(int(pool.score([(TASK, "", spec)])[0].value))
        worker.kill()
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert [r.status for r in judge(pool, "1", "2")] == ["ok", "ok"]


def test_a_notice_to_all_processes_of_a_job_leaves_the_workers_at_work(pool):
    judge(pool, "1")
    workers = psutil.Process().children()
    for worker in workers:
        worker.terminate()
    assert [r.status for r in judge(pool, *map(str, range(40)))] == ["ok"] * 40
    assert psutil.Process().children() == workers


def test_scoring_from_several_threads_at_once(pool):
    results = {}

    def work(number):
        results[number] = [r.value for r in judge(pool, *([str(number)] * 40))]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: [float(i)] * 40 for i in range(8)}


def test_scoring_from_a_jax_host_callback_ends_even_when_the_verifier_hangs(pool):
    def verify(values):
        responses = ["hang" if v < 0 else str(float(v)) for v in np.asarray(values)]
        rewards = judge(pool, *responses)
        return np.array([r.value if r.status == "ok" else np.nan for r in rewards], np.float32)

    @jax.jit
    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jax.experimental.io_callback(verify, shape, x)

    with jax.default_device(jax.devices("cpu")[0]):
        result = np.asarray(step(jnp.array([1.0, -1.0, 3.0])))
    np.testing.assert_array_equal(result, [1.0, np.nan, 3.0])


def test_math_is_judged_off_the_main_thread(pool):
    task = Task(id="1", domain="test", prompt=(), answer=r"\frac{1}{3}")
    found = []
    spec = VerifierSpec("math")
    thread = threading.Thread(
        target=lambda: found.extend(pool.score([(task, r"\boxed{\frac{1}{3}}", spec)]))
    )
    thread.start()
    thread.join(30)
    assert [r.value for r in found] == [1.0]


def test_a_power_tower_is_no_right_answer_and_the_pool_lives_on(pool):
    task = Task(id="1", domain="test", prompt=(), answer="5")
    spec = VerifierSpec("math")
    rewards = pool.score([(task, r"\boxed{9^{9^{9^{9}}}}", spec), (task, r"\boxed{5}", spec)])
    assert [r.value for r in rewards] == [0.0, 1.0]


def test_a_nested_radical_of_two_hundred_terms_is_judged_within_the_deadline(pool):
    radical = "1"
    for term in range(2, 202):
        radical = rf"{term}+\sqrt{{{radical}}}"
    task = Task(id="1", domain="test", prompt=(), answer=radical)
    spec = VerifierSpec("math")
    rewards = pool.score(
        [(task, rf"\boxed{{{answer}}}", spec) for answer in (radical, radical + "+1", "5")]
    )
    assert [(r.value, r.status) for r in rewards] == [(1.0, "ok"), (0.0, "ok"), (0.0, "ok")]


def test_catastrophic_backtracking_is_a_timeout(pool):
    spec = VerifierSpec("regex", params={"pattern": r"(a+)+b"})
    rewards = pool.score([(TASK, "a" * 60, spec), (TASK, "aab", spec)])
    assert [(r.value, r.status) for r in rewards] == [(0.0, "timeout"), (1.0, "ok")]


def test_parameters_reach_registered_verifiers_and_callables(pool):
    specs = [
        VerifierSpec("numeric", params={"mode": "last", "abs_tol": 1}),
        VerifierSpec(hostile.scaled, params={"scale": 10.0}),
        VerifierSpec(hostile.Threshold(3)),
        VerifierSpec(functools.partial(hostile.scaled, scale=2.0)),
    ]
    rewards = pool.score([(TASK, "is 43", spec) for spec in specs])
    assert [r.value for r in rewards] == [1.0, 50.0, 1.0, 10.0]
    assert [r.name for r in rewards] == ["numeric", "scaled", "threshold", "partial"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: VerifierSpec("exakt"), "did you mean 'exact'"),
        (lambda: VerifierSpec("exact", params={"case": True}), "case"),
        (lambda: VerifierSpec("numeric", params={"mode": "first"}), "expected one of"),
        (lambda: VerifierSpec(3), "expected a registered name"),
        (lambda: VerifierSpec("exact", weight=float("nan")), "finite"),
        (lambda: VerifierSpec(lambda task, response: 1.0), "top level of a module"),
    ],
)
def test_a_wrong_spec_raises_where_it_is_used(pool, spec, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pool.score([(TASK, "42", spec())])


def test_a_job_that_cannot_be_pickled_is_named(pool):
    task = Task(id="1", domain="test", prompt=(), answer=threading.Lock())
    with pytest.raises(TypeError, match="job 1 cannot be sent"):
        pool.score([(TASK, "42", EXACT), (task, "42", EXACT)])


@pytest.mark.parametrize("verifier", [hostile.DiesWhenLoaded(), hostile.FailsWhenLoaded()])
def test_a_verifier_that_cannot_be_loaded_fails_its_jobs_only(pool, verifier):
    jobs = [(TASK, "42", spec) for spec in [VerifierSpec(verifier), EXACT] * 40]
    rewards = pool.score(jobs)
    assert [r.status for r in rewards] == ["failed", "ok"] * 40
    assert "could not be loaded" in rewards[0].detail


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 0}, {"timeout_s": 0}, {"timeout_s": float("inf")}]
)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        VerifierPool(**arguments)


def test_lone_surrogates_travel(pool):
    task = Task(id="1", domain="test", prompt=(), answer="\ud800")
    assert pool.score([(task, "\ud800", EXACT)])[0].value == 1.0


def test_close_takes_less_than_a_second_and_settles_what_runs():
    pool = VerifierPool(2, timeout_s=60.0)
    results = []
    thread = threading.Thread(target=lambda: results.extend(judge(pool, *(["hang"] * 20))))
    thread.start()
    time.sleep(1.5)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 1
    thread.join(5)
    assert [r.status for r in results] == ["failed"] * 20
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([(TASK, "42", EXACT)])


def test_closing_while_workers_start_leaves_nothing_behind():
    pool = VerifierPool(2)
    pool.close()
    for thread in pool._shared.threads:
        thread.join(10)
    assert not pool._shared.workers


def test_a_pool_that_is_dropped_kills_its_workers():
    pool = VerifierPool(1)
    [reward] = pool.score([(TASK, "", VerifierSpec(hostile.process_id))])
    worker = psutil.Process(int(reward.value))
    del pool
    gc.collect()
    worker.wait(timeout=5)
    assert not worker.is_running()


def run_script(source, tmp_path, **kwargs):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        **kwargs,
    )


def test_a_script_without_a_main_guard_runs_once_and_exits_in_time(tmp_path):
    result = run_script(
        """
        print("once")
        from rlvr_jax.rewards import VerifierPool, VerifierSpec
        from rlvr_jax.types import Task
        pool = VerifierPool(2)
        task = Task(id="1", domain="test", prompt=(), answer="42")
        print(pool.score([(task, "42", VerifierSpec("exact"))])[0].value)
        """,
        tmp_path,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "once\n1.0\n", "")


def test_a_verifier_defined_in_the_script_is_refused_with_a_reason(tmp_path):
    result = run_script(
        """
        from rlvr_jax.rewards import VerifierPool, VerifierSpec
        from rlvr_jax.types import Task
        def mine(task, response):
            return 1.0
        with VerifierPool(1) as pool:
            try:
                pool.score([(Task(id="1", domain="d", prompt=(), answer=""), "", VerifierSpec(mine))])
            except TypeError as error:
                print(error)
        """,
        tmp_path,
    )
    assert "move it into a module" in result.stdout and result.returncode == 0


def test_workers_die_with_a_trainer_that_is_killed(tmp_path):
    result = run_script(
        """
        import os, signal
        from rlvr_jax.rewards import VerifierPool, VerifierSpec
        from rlvr_jax.types import Task
        from tests.rewards import hostile
        pool = VerifierPool(1, timeout_s=60)
        task = Task(id="1", domain="test", prompt=(), answer="42")
        reward = pool.score([(task, "", VerifierSpec(hostile.process_id))])[0]
        print(int(reward.value), flush=True)
        import threading, time
        jobs = [(task, "hang", VerifierSpec(hostile.by_response))]
        threading.Thread(target=pool.score, args=(jobs,)).start()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    worker = int(result.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlived the trainer"
        time.sleep(0.05)


def test_a_worker_that_cannot_start_fails_jobs_with_what_it_said(monkeypatch):
    monkeypatch.setattr("rlvr_jax.rewards.process._WORKER_MODULE", "rlvr_jax.rewards.absent")
    with VerifierPool(1) as pool:
        [reward] = pool.score([(TASK, "42", EXACT)])
    assert reward.status == "failed"
    assert "did not start" in reward.detail and "absent" in reward.detail


def test_workers_run_on_the_cpu_and_do_not_initialise_jax(pool):
    spec = VerifierSpec(hostile.jax_state)
    [reward] = pool.score([(TASK, "", spec)])
    assert reward.value == 0.0, reward


def test_cheap_jobs_are_judged_by_the_thousand(pool):
    jobs = [(TASK, "42", EXACT)] * 4000
    pool.score(jobs[:10])
    start = time.monotonic()
    rewards = pool.score(jobs)
    assert all(r.value == 1.0 for r in rewards)
    assert time.monotonic() - start < 4
