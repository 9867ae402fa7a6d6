"""The files for clusters, as far as they can be checked without one."""

import os
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from meshtrain.launch import cluster
from meshtrain.plan.cluster import clusters

ROOT = pathlib.Path(__file__).parents[2]
SBATCH = ROOT / "scripts" / "slurm.sbatch"
SRUN = """#!/usr/bin/env bash
printf "%s\\n" "$@" >> "$SAID"
case " $* " in *" doctor "*) exit "$UNWELL" ;; esac
[ "$2" = "--ntasks=${FITS:-8}" ] || exit 69
if [ -n "${TOLD:-}" ]; then
  for _ in {1..200}; do [ -e "$TOLD" ] && exit 75 || sleep 0.05; done
fi
exit "$CODE"
"""
SCONTROL = '#!/usr/bin/env bash\nprintf "scontrol %s\\n" "$*" >> "$SAID"\n'
SINFO = '#!/usr/bin/env bash\nprintf "sinfo %s\\n" "$*" > "$TOLD.sinfo"; echo 2\n'
SCANCEL = '#!/usr/bin/env bash\nprintf "%s\\n" "$*" > "$TOLD"\n'


def batch(folder, code, unwell, **more):
    """Runs the batch script with Slurm's programs of ours; returns (exit code, what srun and scontrol were told)."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO), ("scancel", SCANCEL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    own = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "17", "SAID": str(folder / "said")}
    own |= {"SLURM_JOB_NUM_NODES": "8", "SLURM_JOB_PARTITION": "gpus", **more}
    own |= {"CODE": str(code), "UNWELL": str(unwell), "PATH": f"{folder}:{os.environ['PATH']}"}
    words = ["--config=configs/tiny.py", "--workdir=a b"]
    done = subprocess.run(["bash", SBATCH, *words], env={**os.environ, **own}, cwd=folder)
    return done.returncode, (folder / "said").read_text().splitlines()


PROGRAM = [".venv/bin/python", "-m", "meshtrain"]
TRAIN = [
    "--nodes=8",
    "--ntasks=8",
    "--kill-on-bad-exit=1",
    *PROGRAM,
    "train",
    "--config=configs/tiny.py",
    "--workdir=a b",
]
DOCTOR = ["--kill-on-bad-exit=0", *PROGRAM, "doctor", "--gpus=8", "--config=configs/tiny.py", "--workdir=a b"]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (3, False), (75, True), (4, True)])
def test_the_batch_script_starts_the_program_and_puts_the_job_back_where_that_helps(tmp_path, code, requeued):
    returned, said = batch(tmp_path, code, 0)
    assert returned == code
    assert said[: len(DOCTOR)] == DOCTOR
    said = said[len(DOCTOR) :]
    assert said[: len(TRAIN)] == ["--nodes=8", "--ntasks=8", *TRAIN[2:]]
    assert said[len(TRAIN) :] == (["scontrol requeue 17"] if requeued else [])


def test_with_fewer_hosts_the_batch_script_starts_as_many_as_fit(tmp_path):
    more = {"SLURM_JOB_NUM_NODES": "7", "MESHTRAIN_FULL_PROCESSES": "8", "FITS": "6"}
    returned, said = batch(tmp_path, 0, 0, **more)
    assert returned == 0
    starts = [[f"--nodes={n}", f"--ntasks={n}", *TRAIN[2:]] for n in (7, 6)]
    assert said[len(DOCTOR) :] == [word for start in starts for word in start]


def test_once_enough_hosts_are_idle_the_run_saves_and_the_job_is_queued_again(tmp_path):
    told = tmp_path / "told"
    more = {"SLURM_JOB_NUM_NODES": "6", "MESHTRAIN_FULL_PROCESSES": "8", "FITS": "6", "IDLE_SECONDS": "0.1"}
    returned, said = batch(tmp_path, 0, 0, TOLD=str(told), **more)
    assert returned == 75
    assert said[-1] == "scontrol requeue 17"
    assert told.read_text() == "--signal=TERM 17\n"
    asked = (tmp_path / "told.sinfo").read_text()
    assert asked == "sinfo --noheader --partition=gpus --states=idle --format=%D\n"


def test_the_batch_script_ends_where_the_doctor_finds_an_error(tmp_path):
    assert batch(tmp_path, 0, 2) == (2, DOCTOR)


def test_the_batch_script_asks_for_the_devices_of_its_configuration():
    options = dict(
        line.split()[1].removeprefix("--").partition("=")[::2]
        for line in SBATCH.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == 64
    assert options["ntasks-per-node"] == "1"


@pytest.fixture
def kubernetes():
    """kind -> document."""
    return documents("kubernetes.yaml")


def documents(name):
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "scripts" / name).read_text())}


def test_the_job_is_indexed_and_its_pods_find_each_other(kubernetes):
    job, service = kubernetes["Job"], kubernetes["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] in (None, "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    assert spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"] == 64
    assert container["command"] == ["python", "-m", "meshtrain", "train"]
    [first] = pod["initContainers"]
    given = dict(word.removeprefix("--").partition("=")[::2] for word in first["command"] if "=" in word)
    assert first["command"][:4] == ["python", "-m", "meshtrain", "doctor"]
    assert int(given["processes"]) == spec["completions"]
    assert int(given["gpus"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    for shared in ("image", "args", "resources", "volumeMounts"):
        assert first[shared] == container[shared], "what is checked is what will run"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 3]
    assert rule["onExitCodes"]["containerName"] == container["name"]


def test_the_account_may_read_what_jax_asks_for(kubernetes):
    allowed = {(r, v) for rule in kubernetes["Role"]["rules"] for r in rule["resources"] for v in rule["verbs"]}
    assert {("pods", "get"), ("pods", "list"), ("services", "list"), ("jobs", "get")} <= allowed
    assert (
        kubernetes["Job"]["spec"]["template"]["spec"]["serviceAccountName"]
        == kubernetes["ServiceAccount"]["metadata"]["name"]
    )
    assert kubernetes["RoleBinding"]["roleRef"]["name"] == kubernetes["Role"]["metadata"]["name"]


def test_the_jobset_is_the_same_job_whose_pods_start_together(kubernetes):
    files = documents("jobset.yaml")
    jobset, job = files.pop("JobSet")["spec"], kubernetes["Job"]["spec"]
    assert files == {kind: kubernetes[kind] for kind in ("ServiceAccount", "Role", "RoleBinding")}
    [one] = jobset["replicatedJobs"]
    assert one["replicas"] == 1
    pod = job["template"]["spec"]
    del pod["subdomain"]  # JobSet gives the pods its own name as their domain, which JAX expects
    assert one["template"]["spec"] == job | {"backoffLimit": 0}
    [rule] = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_jobset_of_slices_is_the_cluster_that_is_planned(kubernetes, monkeypatch):
    spec = documents("jobset_slices.yaml")["JobSet"]["spec"]
    assert spec["failurePolicy"] == documents("jobset.yaml")["JobSet"]["spec"]["failurePolicy"]
    [slices] = spec["replicatedJobs"]
    job, pod = slices["template"]["spec"], slices["template"]["spec"]["template"]["spec"]
    assert job["podFailurePolicy"] == kubernetes["Job"]["spec"]["podFailurePolicy"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    planned = clusters.parse(f"{slices['replicas']}xv5p:{topology}")
    [container] = pod["containers"]
    chips = job["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert job["completions"] == job["parallelism"]
    assert chips * planned.num_slices == planned.num_devices == 4 * 512
    mesh = dict(word.removeprefix("--config.").split("=") for word in container["args"])
    assert (mesh["mesh.data"], mesh["mesh.fsdp"]) == (str(planned.num_slices), str(chips))
    monkeypatch.setattr(cluster, "_is_installed", lambda package: True)
    told = {"KUBERNETES_SERVICE_HOST": "1", "JOB_COMPLETION_INDEX": "0", "MEGASCALE_NUM_SLICES": "4"}
    told |= {"TPU_WORKER_HOSTNAMES": "a,b"}
    assert cluster.processes(told, "tpu,cpu") == {"cluster_detection_method": "gketpu"}


def test_the_image_is_the_one_that_the_dockerfile_builds(kubernetes):
    text = (ROOT / "Dockerfile").read_text()
    [image] = re.findall(r"--tag (\S+)", text)
    pod = kubernetes["Job"]["spec"]["template"]["spec"]
    assert {container["image"] for container in pod["initContainers"] + pod["containers"]} == {image}
    assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(re.search(r"^USER (\d+)$", text, re.M)[1])}
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert "/runs" in mounts
    assert " /runs\n" in text
    [extras] = re.findall(r"^# DEVICES is (.+?)\.", text, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*re.split(", | or ", extras), "kubernetes"} <= {*project["optional-dependencies"]}
