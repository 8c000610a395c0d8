"""deploy/aws: the Terraform is parsed and held to what it promises; the boot scripts are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashmoe_gguf.server.cloudwatch import DIMENSION, METRICS

hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed")

AWS = Path(__file__).resolve().parent.parent / "deploy" / "aws"
BOOT = AWS / "boot"
Block = dict[str, Any]


def plain(value: Any) -> Any:
    """What hcl2 gives, without its quotes around names and texts and without its own entries."""
    if isinstance(value, dict):
        own = ("__comments__", "__inline_comments__", "__is_block__")
        return {plain(k): plain(v) for k, v in value.items() if k not in own}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


CONFIG = [plain(hcl2.loads(path.read_text("utf-8"))) for path in sorted(AWS.glob("*.tf"))]


def blocks(kind: str) -> list[Block]:
    return [block for file in CONFIG for block in file.get(kind, [])]


def resources(kind: str) -> dict[str, Block]:
    return {
        name: body
        for block in blocks("resource")
        for type_, named in block.items()
        if type_ == kind
        for name, body in named.items()
    }


LOCALS: Block = {name: value for block in blocks("locals") for name, value in block.items()}
VARIABLES: Block = {name: body for block in blocks("variable") for name, body in block.items()}


def test_the_three_sizes() -> None:
    sizes = LOCALS["sizes"]
    assert {name: size["instance_type"] for name, size in sizes.items()} == {
        "small": "g5.xlarge",
        "medium": "g6.2xlarge",
        "large": "p4d.24xlarge",
    }
    small, medium = sizes["small"]["volume"], sizes["medium"]["volume"]
    assert (small["type"], small["size_gib"]) == ("gp3", 250)
    assert small["throughput_mib"] <= small["iops"] / 4  # as much as gp3 allows for its IOPS
    assert (medium["type"], medium["size_gib"], medium["iops"]) == ("io2", 500, 16000)
    assert sizes["large"]["volume"] is None
    storage = (BOOT / "storage.sh").read_text("utf-8")
    assert "--level=0" in storage and "Amazon_EC2_NVMe_Instance_Storage" in storage


def test_every_volume_is_encrypted() -> None:
    volumes = list(resources("aws_ebs_volume").values())
    for instance in resources("aws_instance").values():
        volumes += instance["root_block_device"] + instance.get("ebs_block_device", [])
    assert len(volumes) == 2
    assert [volume.get("encrypted") for volume in volumes] == [True, True]


def test_the_metadata_service_wants_tokens() -> None:
    for instance in resources("aws_instance").values():
        (options,) = instance["metadata_options"]
        assert options["http_tokens"] == "required"
        assert options["http_put_response_hop_limit"] == 1


def test_nothing_comes_in_unless_it_is_asked_for() -> None:
    assert not any("ingress" in group for group in resources("aws_security_group").values())
    assert not resources("aws_security_group_rule")
    rules = resources("aws_vpc_security_group_ingress_rule")
    wanted = {"api": "client_cidrs", "ssh": "ssh_cidrs"}
    assert {name: rule["for_each"] for name, rule in rules.items()} == {
        name: f"${{toset(var.{variable})}}" for name, variable in wanted.items()
    }
    for name, variable in wanted.items():
        assert rules[name]["cidr_ipv4"] == "${each.value}"
        assert VARIABLES[variable]["default"] == []
        assert "172" in str(VARIABLES[variable]["validation"])  # private networks alone
    assert (rules["ssh"]["from_port"], rules["ssh"]["to_port"]) == (22, 22)
    for subnet in resources("aws_subnet").values():
        assert subnet["map_public_ip_on_launch"] is False
    assert resources("aws_instance")["server"]["associate_public_ip_address"] is False


def test_s3_is_reached_directly_and_the_shell_through_ssm() -> None:
    (endpoint,) = resources("aws_vpc_endpoint").values()
    assert endpoint["vpc_endpoint_type"] == "Gateway"
    assert endpoint["service_name"].endswith(".s3")
    assert endpoint["route_table_ids"] == ["${aws_route_table.private.id}"]
    (attached,) = resources("aws_iam_role_policy_attachment").values()
    assert attached["policy_arn"].endswith(":policy/AmazonSSMManagedInstanceCore")


def test_figures_may_be_sent_into_one_namespace_alone() -> None:
    text = (AWS / "access.tf").read_text("utf-8")
    assert re.search(
        r'"cloudwatch:PutMetricData".*?variable = "cloudwatch:namespace"\s+values\s+= '
        r"\[var\.namespace\]",
        text,
        re.S,
    )
    assert text.count('["*"]') == 1


def test_alarms_watch_what_the_program_sends() -> None:
    alarms = resources("aws_cloudwatch_metric_alarm")
    assert set(alarms) == {"token_rate_low", "volume_read_high"}
    low, high = alarms["token_rate_low"], alarms["volume_read_high"]
    assert low["namespace"] == "${var.namespace}" and low["metric_name"] in METRICS
    assert (low["metric_name"], low["comparison_operator"]) == (
        "TokenThroughput",
        "LessThanThreshold",
    )
    assert low["dimensions"] == "${local.dimensions}"
    assert LOCALS["dimensions"] == {DIMENSION: "${var.model_name}"}
    assert low["treat_missing_data"] == "notBreaching"  # an idle server sends nothing
    assert high["comparison_operator"] == "GreaterThanThreshold"
    (metric,) = (query["metric"][0] for query in high["metric_query"] if "metric" in query)
    assert metric["metric_name"] == "${local.reads.metric}" and metric["stat"] == "Sum"
    reads = str(LOCALS["reads"])
    assert "AWS/EBS" in reads and "VolumeReadBytes" in reads
    assert "AWS/EC2" in reads and "DiskReadBytes" in reads


def test_the_dashboard_shows_all_figures() -> None:
    text = (AWS / "monitoring.tf").read_text("utf-8")
    shown = re.findall(r'\{ metric = "(\w+)", title', text)
    assert set(shown) == set(METRICS)
    assert f'"{DIMENSION}", var.model_name' in text


def test_the_server_gets_the_namespace_and_the_name() -> None:
    text = (AWS / "server.tf").read_text("utf-8")
    assert "--cloudwatch ${var.namespace}" in text
    assert '"AWS_REGION=${var.region}\\nFLASHMOE_OPTIONS=' in text
    assert re.search(r"model_name\s+= var\.model_name", text)


def test_every_variable_is_described_and_those_that_could_be_wrong_are_validated() -> None:
    free = {"availability_zone", "ssh_key_name"}  # AWS knows which there are
    for name, body in VARIABLES.items():
        assert body["description"] and body["type"], name
        assert name in free or body["validation"][0]["error_message"], name
    used = set(re.findall(r"var\.(\w+)", "".join(p.read_text("utf-8") for p in AWS.glob("*.tf"))))
    assert used == set(VARIABLES)


def test_no_variable_takes_a_secret() -> None:
    assert VARIABLES["api_key_name"].get("default") is None
    assert not [name for name in VARIABLES if name in ("api_key", "key", "token", "password")]
    text = "".join(p.read_text("utf-8") for p in AWS.glob("*.tf"))
    assert "aws_secretsmanager_secret_version" not in text
    assert not re.search(r'data "aws_ssm_parameter" "(?!ubuntu")', text)


def test_outputs_are_described() -> None:
    outputs = {name: body for block in blocks("output") for name, body in block.items()}
    assert {"instance_id", "tunnel", "shell", "url", "dashboard"} <= set(outputs)
    assert all(body["description"] for body in outputs.values())


def test_links_of_the_readme() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (AWS / "README.md").read_text("utf-8")):
        assert (AWS / target).exists(), target


def test_the_readme_tells_the_sizes_and_the_example_sets_what_has_no_default() -> None:
    text = (AWS / "README.md").read_text("utf-8")
    for name, size in LOCALS["sizes"].items():
        assert f"| `{name}` | {size['instance_type']}: " in text
    example = plain(hcl2.loads((AWS / "terraform.tfvars.example").read_text("utf-8")))
    needed = {name for name, body in VARIABLES.items() if "default" not in body}
    assert needed <= set(example) <= set(VARIABLES)


# What the first boot gets


def template_call() -> dict[str, str]:
    """Names that server.tf gives to deploy.env.tftpl."""
    text = (AWS / "server.tf").read_text("utf-8")
    found = re.search(r'deploy\.env\.tftpl", \{(.*?)\n  \}\)', text, re.S)
    assert found is not None
    return dict(re.findall(r"^\s+(\w+)\s+= (.+)$", found[1], re.M))


def test_all_variables_of_the_template_are_given_and_used() -> None:
    template = (BOOT / "deploy.env.tftpl").read_text("utf-8")
    assert set(re.findall(r"\$\{(\w+)\}", template)) == set(template_call())


def test_all_files_that_the_configuration_reads_are_there() -> None:
    text = (AWS / "server.tf").read_text("utf-8")
    paths = re.findall(r'file\("\$\{path\.module\}/([^"$]+)"\)', text)
    names = re.findall(r"for name in \[([^\]]+)\]", text)[0]
    paths += [f"boot/{name}.sh" for name in re.findall(r'"(\w+)"', names)]
    assert len(paths) == 7
    for path in paths:
        assert (AWS / path).is_file(), path
    unused = {p.name for p in BOOT.iterdir()} - {Path(p).name for p in paths}
    assert unused == {"deploy.env.tftpl"}


def test_what_the_scripts_read_is_in_their_settings() -> None:
    settings = re.findall(
        r"^(?:export )?([A-Z_]+)=", (BOOT / "deploy.env.tftpl").read_text("utf-8"), re.M
    )
    known = {*settings, "BASH_REMATCH", "FLASHMOE_ROOT", "PATH"}
    for script in BOOT.glob("*.sh"):
        text = re.sub(r"^\s*#.*$", "", script.read_text("utf-8"), flags=re.M)
        assert set(re.findall(r"\$\{?#?([A-Z_]+)", text)) <= known, script.name
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
        assert text.lstrip().startswith("set -euo pipefail\n"), script.name


class Machine:
    """A folder that stands for an instance, with programs that note what they are asked."""

    def __init__(self, root: Path, **settings: str) -> None:
        self.root = root
        for name in ("bin", "etc/flashmoe", "opt/flashmoe/bin", "srv/models"):
            (root / name).mkdir(parents=True)
        values = {
            "region": "eu-central-1",
            "wheels": "s3://bucket/wheels",
            "model": "s3://bucket/models/big.gguf",
            "model_name": "big",
            "ram": "12G",
            "context": "8192",
            "listen": "loopback",
            "port": "8001",
            "namespace": "FlashMoE",
            "volume_id": "",
            "api_key_source": "ssm",
            "api_key_name": "/flashmoe/api-key",
            **settings,
        }
        text = (BOOT / "deploy.env.tftpl").read_text("utf-8")
        (root / "etc/flashmoe/deploy.env").write_text(
            re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], text)
        )
        self.program("bin/python3", f'exec {sys.executable} "$@"', quiet=True)

    def program(self, path: str, body: str, quiet: bool = False) -> None:
        note = "" if quiet else f'echo "$(basename $0) $*" >>{self.root}/calls\n'
        (self.root / path).write_text(f"#!/bin/bash\n{note}{body}\n")
        (self.root / path).chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(BOOT / f"{script}.sh")],
            env={"FLASHMOE_ROOT": str(self.root), "PATH": f"{self.root}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=30,
        )

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text("utf-8").splitlines()

    @property
    def config(self) -> Any:
        return json.loads((self.root / "etc/flashmoe/server.json").read_text("utf-8"))


def test_a_model_in_s3(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    model = tmp_path / "srv/models/big.gguf"
    machine.program("bin/aws", f"touch {model}; chmod 600 {model}")
    done = machine.run("model")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls == [
        f"aws s3 sync s3://bucket/models/ {tmp_path}/srv/models/ --size-only --no-progress "
        "--exclude * --include big.gguf"
    ]
    assert machine.config == {
        "host": "127.0.0.1",
        "port": 8001,
        "models": [{"model": str(model), "model_alias": "big", "n_ctx": 8192, "ram": "12G"}],
    }
    assert model.stat().st_mode & 0o004  # the server is another user


def test_shards_come_together(tmp_path: Path) -> None:
    machine = Machine(tmp_path, model="s3://bucket/big-00001-of-00003.gguf")
    machine.program("bin/aws", f"touch {tmp_path}/srv/models/big-00001-of-00003.gguf")
    assert machine.run("model").returncode == 0
    assert machine.calls[0].startswith("aws s3 sync s3://bucket/ ")
    assert machine.calls[0].endswith("--include big-?????-of-00003.gguf")
    assert machine.config["models"][0]["model"].endswith("big-00001-of-00003.gguf")


def test_a_model_of_the_hub_on_a_private_address(tmp_path: Path) -> None:
    machine = Machine(tmp_path, model="gpt-oss-20b", listen="private")
    model = tmp_path / "srv/models/gpt-oss-20b-MXFP4.gguf"
    machine.program("opt/flashmoe/bin/flashmoe", f"touch {model}; echo {model}")
    machine.program(
        "bin/curl",
        "[[ $* == *PUT* ]] && echo token && exit; [[ $* == *token ]] && echo 10.77.0.200",
    )
    done = machine.run("model")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls[0] == f"flashmoe pull gpt-oss-20b -o {tmp_path}/srv/models"
    assert machine.config["host"] == "10.77.0.200"
    assert machine.config["models"][0]["model"] == str(model)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.program("bin/aws", "")  # a sync of nothing succeeds
    done = machine.run("model")
    assert done.returncode == 1
    assert done.stderr == f"there is no {tmp_path}/srv/models/big.gguf\n"
    assert not (tmp_path / "etc/flashmoe/server.json").exists()


@pytest.mark.parametrize(
    ("source", "call"),
    [("ssm", "ssm get-parameter --name"), ("secretsmanager", "secretsmanager get-secret-value")],
)
def test_the_key_is_for_root_alone(tmp_path: Path, source: str, call: str) -> None:
    machine = Machine(tmp_path, api_key_source=source)
    machine.program("bin/aws", "echo 0123456789abcdefg")
    done = machine.run("key")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.calls[0].startswith(f"aws {call}") and "/flashmoe/api-key" in machine.calls[0]
    key = tmp_path / "run/flashmoe/key.env"
    assert key.read_text("utf-8") == "FLASHMOE_API_KEY=0123456789abcdefg\n"
    assert key.stat().st_mode & 0o077 == 0
    drop_in = (BOOT / "aws.conf").read_text("utf-8")
    assert "\nEnvironmentFile=/run/flashmoe/key.env\n" in drop_in  # no "-": no key, no server


@pytest.mark.parametrize(
    "answer", ["None", "", "short", "two words that are long", "0123456789$(id)x"]
)
def test_a_key_that_is_none_is_refused_and_not_shown(tmp_path: Path, answer: str) -> None:
    machine = Machine(tmp_path)
    machine.program("bin/aws", f"echo '{answer}'")
    done = machine.run("key")
    assert done.returncode == 1
    assert done.stderr.startswith("/flashmoe/api-key: a key has 16 to 512 ")
    assert not answer or answer not in done.stdout + done.stderr
    assert not (tmp_path / "run/flashmoe/key.env").exists()


# With terraform itself


def test_format() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    done = terraform("fmt", "-check", "-recursive", cwd=AWS)
    assert done.stdout == ""


def test_plans(tmp_path: Path) -> None:
    """`terraform validate` and deploy/aws/tests, which make all three sizes up."""
    plugins = os.environ.get("FLASHMOE_TERRAFORM_PLUGINS")
    if plugins is None or shutil.which("terraform") is None:
        pytest.skip(
            "needs terraform, and FLASHMOE_TERRAFORM_PLUGINS: a mirror with the AWS provider"
        )
    here = tmp_path / "deploy"
    shutil.copytree(AWS.parent, here, ignore=shutil.ignore_patterns(".terraform*"))
    assert (
        terraform("init", "-input=false", f"-plugin-dir={plugins}", cwd=here / "aws").returncode
        == 0
    )
    assert json.loads(terraform("validate", "-json", cwd=here / "aws").stdout)["valid"] is True
    done = terraform("test", "-no-color", cwd=here / "aws")
    assert done.returncode == 0, done.stdout + done.stderr


def terraform(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    config = {"TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1"}
    return subprocess.run(
        ["terraform", *words],
        cwd=cwd,
        env={**os.environ, **config},
        capture_output=True,
        text=True,
        timeout=600,
    )
