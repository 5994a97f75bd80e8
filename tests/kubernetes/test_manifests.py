"""The manifests of examples/kubernetes: fields that exist, commands that parse, images that are
built, secrets and labels that agree."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnxpar.cli.parser import parser
from onnxpar.runtime.launch.launch import HELP, launched_rank

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
SCHEMA = Path(__file__).with_name("schema.json")
RANK = "ONNXPAR_RANK"
"""The only variable that Kubernetes fills in for each pod."""


def manifests() -> list[dict[str, Any]]:
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert [file.stem for file in files] == ["certificates", "jobset", "mpijob", "serve"]
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [each for each in manifests() if each["kind"] == kind]
    return found


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """The pods in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from pod_specs(each)
    if isinstance(value, list):
        for each in value:
            yield from pod_specs(each)


def containers() -> list[dict[str, Any]]:
    return [c for pod in pod_specs(manifests()) for c in pod["containers"]]


def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("number", range(len(manifests())))
def test_fields_exist(number: int) -> None:
    validator().validate(manifests()[number])


def places(value: Any) -> Iterator[dict[str, Any]]:
    """Every object with fields in a manifest."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from places(each)
    if isinstance(value, list):
        for each in value:
            yield from places(each)


def test_an_unknown_field_is_refused_everywhere() -> None:
    check, refused = validator(), 0
    for manifest in manifests():
        for number, place in enumerate(places(manifest)):
            if all(isinstance(each, str) for each in place.values()) and "app" in place:
                continue  # labels, whose names are free
            broken = copy.deepcopy(manifest)
            list(places(broken))[number]["unknown"] = {}
            assert not check.is_valid(broken), place
            refused += 1
    assert refused > 90


def onnxpar_arguments() -> list[list[str]]:
    """The arguments of onnxpar in each container that runs it."""
    found = []
    for each in containers():
        words = [*each["command"], *each["args"]]
        if "onnxpar" in words:
            found.append(words[words.index("onnxpar") + 1 :])
    return found


def test_commands_are_those_of_onnxpar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONNXPAR_TLS_DIR", "ONNXPAR_BIND"):
        monkeypatch.setenv(name, "")  # options set it; the end of the test unsets it
    names = [parser().parse_args(words).command.__name__ for words in onnxpar_arguments()]
    assert len(names) == 3 and len({*names}) == 3


def test_variables_are_those_of_a_launcher() -> None:
    job = of_kind("JobSet")["spec"]
    (ranks,) = job["replicatedJobs"]
    spec = ranks["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {v["name"]: v.get("value", "0") for v in container["env"]}
    assert all(name in HELP for name in variables)
    launched = launched_rank(variables)
    assert launched is not None
    assert launched.size == spec["completions"] == spec["parallelism"]
    (rank,) = [v for v in container["env"] if v["name"] == RANK]
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    host = (
        f"{of_kind('JobSet')['metadata']['name']}-{ranks['name']}-0-0.{job['network']['subdomain']}"
    )
    assert re.fullmatch(rf"tcp://{re.escape(host)}:\d+", launched.store)


def test_ranks_of_mpirun_have_slots() -> None:
    spec = of_kind("MPIJob")["spec"]
    replicas = spec["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    ranks = int(launcher["args"][launcher["args"].index("-n") + 1])
    assert ranks == spec["slotsPerWorker"] * replicas["Worker"]["replicas"]
    folder = spec["sshAuthMountPath"]
    sshd = (EXAMPLES / "sshd_config").read_text()
    assert f"HostKey {folder}/id_rsa" in sshd
    assert f"AuthorizedKeysFile {folder}/authorized_keys" in sshd
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    for file in ("sshd_config", "ssh_config"):
        assert f"Port {port}\n" in (EXAMPLES / file).read_text()
    assert f"sshd_config {worker['args'][-1]}\n" in (EXAMPLES / "Dockerfile").read_text()


def test_images_are_built() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    tags = set(re.findall(r"-t (\S+)", text))
    assert {c["image"] for c in containers()} == tags
    targets = set(re.findall(r"--target (\w+)", text))
    assert targets == set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.M))
    for name in re.findall(r"^COPY .*?(examples/\S+)", text, re.M):
        assert (EXAMPLES.parents[1] / name).is_file()
    assert not re.search(r"gcc|g\+\+|clang|build-essential|cmake", text)
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["1000", "root", "1000"]


def test_pods_are_not_root_and_have_what_they_mount() -> None:
    for pod in pod_specs(manifests()):
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        )
        assert pod["automountServiceAccountToken"] is False
        volumes = {v["name"] for v in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {m["name"] for m in container.get("volumeMounts", ())} == volumes
            folders = [m["mountPath"] for m in container.get("volumeMounts", ())]
            words = [w for w in container["args"] if w.startswith(("/shared", "/etc/onnxpar"))]
            assert not folders or all(w.startswith(tuple(folders)) for w in words)


def test_certificates_are_those_of_the_ranks() -> None:
    made = {m["spec"]["secretName"] for m in manifests() if m["kind"] == "Certificate"}
    mounted = {
        v["secret"]["secretName"]
        for pod in pod_specs([of_kind("JobSet"), of_kind("MPIJob")])
        for v in pod.get("volumes", ())
        if "secret" in v
    }
    assert mounted == {"onnxpar-tls"} and mounted <= made
    for words in onnxpar_arguments():
        assert ("--tls-dir" in words) == (words[0] != "serve")


def test_no_secret_is_in_a_manifest() -> None:
    for container in containers():
        for variable in container.get("env", ()):
            assert variable["name"] != "ONNXPAR_KEY" or "secretKeyRef" in variable["valueFrom"]
        assert "--api-key" not in container["args"]


def test_labels_agree() -> None:
    for pod in pod_specs(manifests()):
        for term in (
            pod.get("affinity", {})
            .get("podAntiAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", ())
        ):
            assert term["labelSelector"]["matchLabels"] in [
                t["metadata"]["labels"]
                for t in places(manifests())
                if t.get("spec") is not None and "labels" in t.get("metadata", {})
            ]
    serve, service = of_kind("Deployment")["spec"], of_kind("Service")["spec"]
    assert serve["selector"]["matchLabels"] == serve["template"]["metadata"]["labels"]
    assert service["selector"] == serve["template"]["metadata"]["labels"]
    (container,) = serve["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert container["args"][container["args"].index("--port") + 1] == str(port["containerPort"])
    assert service["ports"][0]["targetPort"] == port["name"]


def test_kubernetes_own_schema() -> None:
    """The pods, in resources that Kubernetes itself has, by its schemas."""
    validate = pytest.importorskip("kubernetes_validate").validate
    jobs = [r["template"]["spec"] for r in of_kind("JobSet")["spec"]["replicatedJobs"]]
    for number, spec in enumerate(jobs):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"j{number}"}}
        validate({**job, "spec": spec}, "1.30", strict=True)
    for number, pod in enumerate(pod_specs(of_kind("MPIJob"))):
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}"}}
        validate({**made, "spec": pod}, "1.30", strict=True)
    for kind in ("Deployment", "Service"):
        validate(of_kind(kind), "1.30", strict=True)
