"""Where the processes of a job meet, read from the environment: the same place as JAX finds."""

import dataclasses
import importlib
import importlib.metadata

import pytest

from meshtrain.errors import UserError
from meshtrain.launch import cluster
from meshtrain.launch.cluster import Meeting, hosts_of, meeting

SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,other", ["node1", "other"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("a[1,3-4]-ib,b2", ["a1-ib", "a3-ib", "a4-ib", "b2"]),
    ],
)
def test_the_hosts_of_a_list_of_slurms(text, hosts):
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "listed", ["node1", "node1,other", "node[001-0015],host2", "node[001,007-015],host2", "a[1-2]-ib"]
)
def test_slurms_address_is_the_one_jax_finds(listed, monkeypatch):
    environ = {**SLURM, "SLURM_STEP_NODELIST": listed}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    theirs = importlib.import_module("jax._src.clusters.slurm_cluster").SlurmCluster
    found = meeting(environ)
    assert found.address == theirs.get_coordinator_address(None, None)
    assert (found.num_processes, found.index) == (theirs.get_process_count(), theirs.get_process_id())


@pytest.mark.parametrize(
    "uri", [OPEN_MPI["OMPI_MCA_orte_hnp_uri"], "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"]
)
def test_open_mpis_address_is_the_one_jax_finds(uri, monkeypatch):
    environ = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": uri}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    theirs = importlib.import_module("jax._src.clusters.ompi_cluster").OmpiCluster
    assert meeting(environ) == Meeting(theirs.get_coordinator_address(None, None), 4, 3)


def test_slurm_says_on_which_machine_each_process_runs():
    found = meeting(SLURM)
    assert found.num_hosts == 4
    assert found.names == ("node1", "node1", "node2", "node2", "node3", "node3", "node4", "node4")
    assert meeting({**SLURM, "SLURM_STEP_NUM_TASKS": "7"}).names == (), "uneven: not known"
    assert meeting({**SLURM, "SLURM_STEP_NODELIST": "r[1-2]n[1-2]"}).names == (), "a list that is not read"
    assert meeting({**SLURM, "JAX_COORDINATOR_ADDRESS": "other:1"}).address == "other:1"


def test_the_pods_of_a_job_are_named_by_their_number(monkeypatch):
    monkeypatch.setattr(cluster, "_is_installed", lambda package: package == "kubernetes")
    found = meeting(POD, 8, lambda: "meshtrain-3.meshtrain.default.svc.cluster.local")
    assert found.address == "meshtrain-0.meshtrain:55527"
    assert (found.num_processes, found.index, found.num_hosts) == (8, 3, 8)
    assert found.names[7] == "meshtrain-7"
    port = importlib.import_module("jax._src.clusters.k8s_cluster").K8sCluster._coordinator_port
    assert found.port == int(port)
    with pytest.raises(UserError, match="allowed: --processes=N"):
        meeting(POD)


def test_by_hand_or_alone():
    found = meeting({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "[::1]:1234"})
    assert dataclasses.astuple(found) == ("[::1]:1234", 2, 1, None, ())
    assert (found.host, found.port) == ("::1", 1234)
    assert meeting({}) is None
    with pytest.raises(UserError, match="got gketpu, where only JAX can determine the other processes"):
        meeting({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "a,b"})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_STEP_NUM_TASKS": "junk"}, "SLURM_STEP_NUM_TASKS"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "-4"}, "SLURM_STEP_NUM_NODES"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID"),
        ({**SLURM, "SLURM_LOCALID": "9" * 5000}, "SLURM_LOCALID"),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_JOB_ID"}, "SLURM_JOB_ID"),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_NTASKS"}, "SLURM_NTASKS"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[a-b]"}, "SLURM_STEP_NODELIST"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-99999999]"}, "SLURM_STEP_NODELIST"),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "localhost:http"}, "JAX_COORDINATOR_ADDRESS"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "junk"}, "OMPI_COMM_WORLD_SIZE"),
        ({name: OPEN_MPI[name] for name in OPEN_MPI if name != "OMPI_COMM_WORLD_RANK"}, "OMPI_COMM_WORLD_RANK"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "junk"}, "OMPI_MCA_orte_hnp_uri"),
        ({"JAX_PLATFORMS": "tpu", "MEGASCALE_NUM_SLICES": "junk"}, "MEGASCALE_NUM_SLICES"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "localhost:http"}, "JAX_COORDINATOR_ADDRESS"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "host:99999"}, "JAX_COORDINATOR_ADDRESS"),
        ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": ":99999"}, "JAX_COORDINATOR_ADDRESS"),
        ({**BY_HAND, "JAX_NUM_PROCESSES": "x"}, "JAX_NUM_PROCESSES"),
        ({**BY_HAND, "JAX_NUM_PROCESSES": "9" * 5000}, "JAX_NUM_PROCESSES"),
        ({**BY_HAND, "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID"),
        ({**BY_HAND, "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID"),
        *(({**BY_HAND, name: ""}, name) for name in BY_HAND),
    ],
)
def test_junk_is_a_line_that_names_the_variable(environ, name):
    with pytest.raises(UserError) as refusal:
        meeting(environ)
    [line] = refusal.value.problems
    assert name in line
    assert "; allowed: " in line
    assert "; nearest: " in line


def test_all_that_a_scheduler_leaves_out_comes_at_once():
    with pytest.raises(UserError) as refusal:
        meeting({**SLURM, "SLURM_PROCID": "x", "SLURM_LOCALID": "", "SLURM_JOB_ID": "y"})
    assert [line.partition(":")[0] for line in refusal.value.problems] == [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
    ]


def test_a_job_may_have_more_processes_than_there_are():
    assert cluster.full_size({}, 3) == 3
    assert cluster.full_size({"MESHTRAIN_FULL_PROCESSES": "8"}, 3) == 8
    with pytest.raises(UserError, match="FULL_PROCESSES: got 2; allowed: at least the 3 processes; nearest: 3"):
        cluster.full_size({"MESHTRAIN_FULL_PROCESSES": "2"}, 3)
    with pytest.raises(UserError, match="FULL_PROCESSES: got eight; allowed: a number"):
        cluster.full_size({"MESHTRAIN_FULL_PROCESSES": "eight"}, 3)


@pytest.mark.parametrize(
    ("platforms", "near"),
    [("junk", "nearest: JAX_PLATFORMS=cpu"), ("cpux", "did you mean 'cpu'?"), ("cuda,junk", "nearest"), ("CPU", "")],
)
def test_an_unknown_platform_is_a_line_that_names_the_variable_and_the_platforms(platforms, near, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    [line] = cluster.platform_problems({"JAX_PLATFORMS": platforms})
    assert line.startswith(f"JAX_PLATFORMS: got '{platforms.split(',')[-1]}'; allowed: cpu, cuda, gpu, rocm, tpu")
    assert near in line


def test_known_platforms_and_those_of_other_packages_are_allowed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    for platforms in ("", "cpu", "cuda,cpu", "tpu"):
        assert cluster.platform_problems({"JAX_PLATFORMS": platforms}) == []
    plugin = importlib.metadata.EntryPoint("metal", "jax_metal", "jax_plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [plugin])
    assert cluster.platform_problems({"JAX_PLATFORMS": "METAL"}) == []
