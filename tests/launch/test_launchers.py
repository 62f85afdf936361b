"""The launchers for many machines: what they would do, what they refuse, and what their command lines do when run.

``ssh``, ``gcloud`` and ``srun`` are replaced by scripts that run here what they would run elsewhere, and ``rlvr`` by
one that writes down how it was called; the quoting through two shells, the environment and the signals are real.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
WHAT = ["--", "train", "--config", 'configs/a.py:it\'s "tiny"', "--workdir", "/shared/a b"]
GKE = ["--name", "first", "--image", "registry/rlvr:1", "--claim", "shared"]
GKE += ["--accelerator", "tpu-v5-lite-podslice", "--topology", "4x4"]
TPU = ["--name", "slice", "--zone", "us-west4-a"]


@pytest.fixture
def checkout(tmp_path):
    """A copy of launch/ beside a .venv that is set up already and whose rlvr only says how it was called."""
    root = tmp_path / "check out"
    shutil.copytree(LAUNCH, root / "launch")
    (root / "pyproject.toml").write_text("[project]\n")
    program(root / ".venv/bin/python", "exit 0")
    program(
        root / ".venv/bin/rlvr",
        'place="$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID"\n'
        'printf "%s\\n" "$place" "$@" >"called.$JAX_PROCESS_ID"',
    )
    (root / "bin").mkdir()
    return root


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def launch(script, *flags, root=LAUNCH.parent, **environment):
    path = f"{root / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", root / "launch" / script, *map(str, flags)],
        env=os.environ | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("gpu.sh", ["--hosts", "--port", "--dry-run"]),
        ("slurm.sh", ["--nodes", "--gpus", "--time", "--notice", "--partition", "--dry-run"]),
        ("tpu_vm.sh", ["create", "install", "run", "logs", "resume", "delete", "--spot", "--nfs"]),
        ("gke/submit.sh", ["--image", "--topology", "--claim", "--max-restarts", "--dry-run"]),
    ],
)
def test_help_names_what_there_is_and_does_nothing(script, flags):
    done = launch(script, "--help")
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in flags)
    assert "set -" not in done.stdout and "shellcheck" not in done.stdout


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("gpu.sh", [], "nothing to run; expected: -- train --config FILE.py --workdir DIR"),
        ("gpu.sh", ["--hosts"], "--hosts needs a value"),
        ("gpu.sh", ["--hosts", "--port", "1"], "--hosts needs a value"),
        ("gpu.sh", ["--port", "x", *WHAT], "--port is 'x'; expected a positive number"),
        ("gpu.sh", ["--", "eval"], "'eval' does not run on many machines; expected train or sft"),
        ("gpu.sh", ["--", "train", "--workdir=w"], "rlvr train needs --config FILE.py"),
        ("gpu.sh", ["--", "sft", "--config=c.py"], "rlvr sft needs --workdir DIR"),
        ("slurm.sh", WHAT, "--nodes is missing"),
        ("slurm.sh", ["--nodes", "0", *WHAT], "--nodes is '0'; expected a positive number"),
        ("slurm.sh", ["--node", "2", *WHAT], "unknown flag --node; known: --nodes"),
        ("tpu_vm.sh", [], "expected a command first, got ''; known: create, install"),
        ("tpu_vm.sh", ["creat"], "expected a command first, got 'creat'"),
        ("tpu_vm.sh", ["logs", "--name", "x"], "--zone is missing"),
        ("tpu_vm.sh", ["create", *TPU, "--dry-run"], "--type is missing"),
        ("tpu_vm.sh", ["run", *TPU, "--dry-run", "--", "train"], "rlvr train needs --config"),
        ("gke/submit.sh", WHAT, "--name is missing"),
        ("gke/submit.sh", [*GKE[:-2], *WHAT], "--topology is missing"),
        ("gke/submit.sh", [*GKE[:-1], "4", *WHAT], "--topology is '4'; expected sizes such as 4x4"),
        (
            "gke/submit.sh",
            [*GKE, "--name", "No", *WHAT],
            "--name is 'No'; expected at most 40 lower",
        ),
        ("gke/submit.sh", [*GKE, "--chips-per-host", "3", *WHAT], "16 chips, which is no multiple"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line_that_says_so(script, flags, message):
    done = launch(script, *flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_dry_run_on_one_gpu_machine_is_the_command_itself():
    done = launch("gpu.sh", "--dry-run", *WHAT)
    assert done.returncode == 0, done.stderr
    setup, train = done.stdout.splitlines()
    assert setup == "+ setup_venv gpu quickstart,cuda13"
    assert train.startswith("+ .venv/bin/rlvr train --config ")


def test_a_dry_run_names_every_host_and_its_place():
    done = launch("gpu.sh", "--hosts", "one,two", "--port", "9999", "--dry-run", *WHAT)
    assert done.returncode == 0, done.stderr
    hosts = re.findall(r"ServerAliveInterval=30 (\w+) ", done.stdout)
    ids = re.findall(r"ADDRESS=one:9999 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=(\d)", done.stdout)
    assert (hosts, ids) == (["one", "two"], ["0", "1"])


def test_gpu_hosts_are_started_with_exactly_the_arguments_given(checkout):
    program(checkout / "bin" / "ssh", 'eval "${@: -1}"')
    done = launch("gpu.sh", "--hosts", "one,two", "--port", "18476", *WHAT, root=checkout)
    assert done.returncode == 0, done.stderr
    for index in range(2):
        called = (checkout / f"called.{index}").read_text().splitlines()
        assert called == [f"one:18476 2 {index}", *WHAT[1:]]


def test_when_one_gpu_host_fails_the_others_are_told_and_the_status_is_its(checkout):
    program(checkout / "bin" / "ssh", 'eval "${@: -1}"')
    text = 'trap "touch told; exit 0" TERM\n[ "$JAX_PROCESS_ID" = 0 ] || exit 7\n'
    program(checkout / ".venv/bin/rlvr", text + "for i in {1..600}; do sleep 0.1; done")
    done = launch("gpu.sh", "--hosts", "one,two", "--port", "18477", *WHAT, root=checkout)
    assert done.returncode == 7
    assert "a process ended with status 7: ending the others" in done.stderr
    assert (checkout / "told").exists()


def test_a_signal_to_the_gpu_launcher_reaches_every_host(checkout):
    program(checkout / "bin" / "ssh", 'eval "${@: -1}"')
    text = 'trap "touch told.$JAX_PROCESS_ID; exit 0" TERM\ntouch up.$JAX_PROCESS_ID\n'
    program(checkout / ".venv/bin/rlvr", text + "for i in {1..600}; do sleep 0.1; done")
    command = ["bash", checkout / "launch/gpu.sh", "--hosts", "one,two", "--port", "18478", *WHAT]
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    launcher = subprocess.Popen(command, env=os.environ | {"PATH": path})
    deadline = time.monotonic() + 60
    while len(list(checkout.glob("up.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 0
    assert {path.name for path in checkout.glob("told.*")} == {"told.0", "told.1"}


def batch_script(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.split("+ sbatch <<SCRIPT\n")[1].removesuffix("SCRIPT\n")


def test_the_batch_script_asks_for_what_was_asked_for():
    flags = ["--nodes", 4, "--gpus", 2, "--partition", "fast", "--time", "1:00:00", "--dry-run"]
    script = batch_script(launch("slurm.sh", *flags, *WHAT))
    asked = re.findall(r"^#SBATCH --(.*)", script, re.MULTILINE)
    for directive in (
        "nodes=4",
        "ntasks-per-node=1",
        "gpus-per-node=2",
        "partition=fast",
        "time=1:00:00",
        "signal=B:TERM@600",
        "requeue",
    ):
        assert directive in asked
    assert not any(directive.startswith("account") for directive in asked)
    without = batch_script(launch("slurm.sh", "--nodes", 1, "--gpus", 0, "--dry-run", *WHAT))
    assert "gpus" not in without


SRUN = """
shift
for index in 0 1; do SLURM_PROCID=$index "$@" & pids="$pids $!"; done
trap 'kill -TERM $pids' TERM
status=0
for pid in $pids; do while kill -0 $pid 2>/dev/null; do wait $pid || status=$?; done; done
exit $status
"""


def run_batch(checkout, *, wait_for=None):
    script = batch_script(launch("slurm.sh", "--nodes", 2, "--dry-run", *WHAT, root=checkout))
    (checkout / "script").write_text(script)
    program(checkout / "bin" / "srun", SRUN)
    program(
        checkout / "bin" / "scontrol", f'echo "$@" >>"{checkout}/scontrol"; printf "n1\\nn2\\n"'
    )
    environment = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "70001",
    }
    job = subprocess.Popen(["bash", checkout / "script"], env=os.environ | environment)
    deadline = time.monotonic() + 60
    while wait_for and len(list(checkout.glob(wait_for))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if wait_for:
        job.send_signal(signal.SIGTERM)
    return job.wait(timeout=60), (checkout / "scontrol").read_text()


def test_a_slurm_job_that_ends_is_not_requeued(checkout):
    status, calls = run_batch(checkout)
    assert status == 0
    assert "requeue" not in calls
    for index in range(2):
        called = (checkout / f"called.{index}").read_text().splitlines()
        assert called == [f"n1:30001 2 {index}", *WHAT[1:]]


def test_a_slurm_job_that_is_told_to_stop_saves_and_is_requeued(checkout):
    text = 'trap "exit $RLVR_PREEMPTED_STATUS" TERM\ntouch up.$JAX_PROCESS_ID\n'
    program(checkout / ".venv/bin/rlvr", text + "for i in {1..600}; do sleep 0.1; done")
    status, calls = run_batch(checkout, wait_for="up.*")
    assert status == 75
    assert "requeue 70001" in calls


def test_the_life_of_a_tpu_slice_in_dry_runs():
    create = ["--type", "v6e-64", "--spot", "--project", "mine"]
    for command, flags, expected in (
        ("create", create, r"queued-resources create slice --zone=us-west4-a --project=mine .*v6e-64.*tpuv6e --spot"),
        ("install", ["--nfs", "10.0.0.2:/share"], r"scp rlvr_jax.tar.gz slice:.*--worker=all\n.*mount -t nfs"),
        ("run", WHAT, r"ssh slice .*--worker=all .*nohup .venv/bin/rlvr train --config"),
        ("logs", ["--worker", "3"], r"ssh slice .*--worker=3 .*tail -n 100 -F"),
        ("stop", [], r"ssh slice .*--worker=all .*kill -TERM"),
        ("delete", [], r"queued-resources delete slice --zone=us-west4-a --force --quiet"),
    ):  # fmt: skip
        done = launch("tpu_vm.sh", command, *TPU, "--dry-run", *flags)
        assert done.returncode == 0, done.stderr
        assert re.search(expected, done.stdout), (command, done.stdout)


def test_resume_after_a_preemption_rebuilds_the_slice_and_starts_the_run():
    done = launch("tpu_vm.sh", "resume", *TPU, "--type", "v5p-16", "--spot", "--dry-run", *WHAT)
    steps = re.findall(r"queued-resources delete|queued-resources create|scp|nohup", done.stdout)
    assert steps == ["queued-resources delete", "queued-resources create", "scp", "nohup"]


def test_a_preempted_slice_is_recreated_and_the_hosts_run_exactly_the_arguments_given(checkout):
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    home = checkout / "home"
    home.mkdir()
    log = checkout / "gcloud.log"
    program(
        checkout / "bin" / "gcloud",
        f"""cd "{home}"; echo "$3 $4 $5" >>"{log}"
case "$3 $4" in
    "queued-resources describe") grep -q create "{log}" && echo ACTIVE || echo SUSPENDED ;;
    "tpu-vm scp") cp "$5" rlvr_jax.tar.gz ;;
    "tpu-vm ssh") for a in "$@"; do case "$a" in --command=*) bash -c "${{a#--command=}}" ;; esac; done ;;
esac""",
    )
    # The hosts have a python already, so nothing is installed with apt-get.
    program(checkout / "bin" / "python3.12", "exit 0")
    flags = [*TPU, "--type", "v5litepod-16"]
    (home / "rlvr_jax/.venv").mkdir(parents=True)
    shutil.copytree(checkout / ".venv", home / "rlvr_jax/.venv", dirs_exist_ok=True)
    done = launch("tpu_vm.sh", "resume", *flags, *WHAT, root=checkout, HOME=str(home))
    assert done.returncode == 0, done.stderr
    calls = log.read_text()
    order = [calls.index(call) for call in ("delete slice", "create slice", "scp", "ssh slice")]
    assert order == sorted(order)
    called = home / "rlvr_jax/called."
    deadline = time.monotonic() + 30
    while not called.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert called.read_text().splitlines()[1:] == WHAT[1:]
    assert (home / "rlvr_jax/launch/gpu.sh").exists()


def manifest(*flags):
    done = launch("gke/submit.sh", *GKE, "--dry-run", *flags, *WHAT)
    assert done.returncode == 0, done.stderr
    text = done.stdout.split("<<MANIFEST\n")[1].removesuffix("MANIFEST\n")
    assert not re.search(r"\$\{[A-Z]", text)
    return yaml.safe_load(text)


def test_the_manifest_is_a_jobset_with_a_pod_a_host_and_the_arguments_given():
    found = manifest("--spot")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 4  # 16 chips, 4 a host
    assert spec["backoffLimit"] == 0  # one pod lost: all start again
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["command"] + container["args"] == ["rlvr", *WHAT[1:]]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"


def test_a_preempted_run_is_restarted_by_the_manifest_and_not_counted():
    found = manifest("--max-restarts", "5")
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    assert policy["rules"] == [
        {
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    preempted = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert container["env"] == [
        {"name": "RLVR_PREEMPTED_STATUS", "value": str(preempted["values"][0])}
    ]
    assert preempted["containerName"] == container["name"]


def test_a_slice_of_one_host_has_as_many_chips_as_its_topology():
    found = manifest("--topology", "1x1")
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == 1
    limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"google.com/tpu": 1}
