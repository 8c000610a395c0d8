# `terraform test`, with an AWS that is made up: nothing is created and no account is needed.
mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-central-1a", "eu-central-1b"] }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { value = "ami-0123456789abcdef0" }
  }
  mock_resource "aws_ebs_volume" {
    defaults = { id = "vol-0123456789abcdef0" }
  }
  mock_resource "aws_cloudwatch_metric_alarm" {
    defaults = { arn = "arn:aws:cloudwatch:eu-central-1:123456789012:alarm:made-up" }
  }
}

variables {
  region       = "eu-central-1"
  wheels       = "s3://my-bucket/wheels"
  model        = "s3://my-bucket/models/big-00001-of-00003.gguf"
  api_key_name = "/flashmoe/api-key"
}

run "small" {
  variables {
    size = "small"
  }
  assert {
    condition     = aws_instance.server.instance_type == "g5.xlarge"
    error_message = "instance type"
  }
  assert {
    condition = (
      aws_ebs_volume.models[0].type == "gp3" && aws_ebs_volume.models[0].size == 250 &&
      aws_ebs_volume.models[0].encrypted
    )
    error_message = "volume"
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.api) + length(aws_vpc_security_group_ingress_rule.ssh) == 0
    error_message = "nothing may come in unless it is asked for"
  }
  assert {
    condition     = strcontains(local.settings, "VOLUME_ID='vol-0123456789abcdef0'") && strcontains(local.settings, "LISTEN='loopback'")
    error_message = "settings of the boot scripts: ${local.settings}"
  }
  assert {
    condition     = length(aws_instance.server.user_data_base64) <= 16384 * 4 / 3
    error_message = "EC2 takes 16 KiB of user data"
  }
  assert {
    condition     = local.model_prefix == "models/big" && local.wheels_prefix == "wheels" && local.model_bucket == "my-bucket"
    error_message = "what may be read from S3"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.volume_read_high.threshold == 333
    error_message = "80 % of what the volume can do"
  }
  assert {
    condition     = jsondecode(aws_cloudwatch_dashboard.this.dashboard_body).widgets[4].properties.metrics[1][0] == "AWS/EBS"
    error_message = "reads on the dashboard"
  }
  assert {
    condition     = output.url == "http://127.0.0.1:8000/v1" && startswith(output.tunnel, "aws ssm start-session")
    error_message = "how it is reached"
  }
}

run "medium" {
  variables {
    size = "medium"
  }
  assert {
    condition     = aws_instance.server.instance_type == "g6.2xlarge"
    error_message = "instance type"
  }
  assert {
    condition = (
      aws_ebs_volume.models[0].type == "io2" && aws_ebs_volume.models[0].size == 500 &&
      aws_ebs_volume.models[0].iops == 16000 && aws_ebs_volume.models[0].encrypted
    )
    error_message = "volume"
  }
}

run "large" {
  variables {
    size           = "large"
    model          = "gpt-oss-120b"
    api_key_source = "secretsmanager"
    client_cidrs   = ["10.20.0.0/16"]
    ssh_cidrs      = ["10.30.0.0/24"]
  }
  assert {
    condition     = aws_instance.server.instance_type == "p4d.24xlarge"
    error_message = "instance type"
  }
  assert {
    condition     = length(aws_ebs_volume.models) == 0 && strcontains(local.settings, "VOLUME_ID=''")
    error_message = "its own drives"
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.ssh["10.30.0.0/24"].from_port == 22 && aws_vpc_security_group_ingress_rule.api["10.20.0.0/16"].from_port == 8000
    error_message = "what may come in"
  }
  assert {
    condition = anytrue([
      for query in aws_cloudwatch_metric_alarm.volume_read_high.metric_query :
      try(query.metric[0].namespace == "AWS/EC2" && query.metric[0].metric_name == "DiskReadBytes", false)
    ])
    error_message = "reads of the instance's own drives"
  }
  assert {
    condition     = output.tunnel == null && local.model_bucket == null && !local.model_in_s3
    error_message = "reached by its private address, model from the hub"
  }
}

run "ssh_from_everywhere_is_refused" {
  command = plan
  variables {
    size      = "small"
    ssh_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.ssh_cidrs]
}

run "clients_from_everywhere_are_refused" {
  command = plan
  variables {
    size         = "small"
    client_cidrs = ["10.0.0.0/0"]
  }
  expect_failures = [var.client_cidrs]
}

run "other_wrong_values_are_refused" {
  command = plan
  variables {
    size         = "huge"
    region       = "Frankfurt"
    wheels       = "my-bucket/wheels"
    model        = "s3://my-bucket/model.bin"
    ram          = "lots"
    namespace    = "AWS/EC2"
    api_key_name = "a key"
  }
  expect_failures = [
    var.size, var.region, var.wheels, var.model, var.ram, var.namespace, var.api_key_name,
  ]
}
