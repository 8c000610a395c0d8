data "aws_ssm_parameter" "ubuntu" {
  count = var.ami_id == null ? 1 : 0
  name  = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
}

locals {
  # The scripts are files as they are; what differs from one deployment to another is in deploy.env.
  scripts = {
    for name in ["install", "storage", "model", "key"] :
    "/usr/local/lib/flashmoe/${name}" => file("${path.module}/boot/${name}.sh")
  }
  settings = templatefile("${path.module}/boot/deploy.env.tftpl", {
    region         = var.region
    wheels         = var.wheels
    model          = var.model
    model_name     = var.model_name
    ram            = var.ram
    context        = var.context
    listen         = local.listen
    port           = var.port
    namespace      = var.namespace
    volume_id      = local.volume == null ? "" : aws_ebs_volume.models[0].id
    api_key_source = var.api_key_source
    api_key_name   = var.api_key_name
  })
  user_data = {
    write_files = concat(
      [for path, text in local.scripts : { path = path, permissions = "0755", content = text }],
      [
        { path = "/etc/flashmoe/deploy.env", permissions = "0644", content = local.settings },
        {
          path        = "/etc/flashmoe/flashmoe.conf"
          permissions = "0644"
          content     = "AWS_REGION=${var.region}\nFLASHMOE_OPTIONS=--config /etc/flashmoe/server.json --cloudwatch ${var.namespace}\n"
        },
        {
          path        = "/etc/systemd/system/flashmoe.service"
          permissions = "0644"
          content     = file("${path.module}/../flashmoe.service")
        },
        {
          path        = "/etc/systemd/system/flashmoe.service.d/aws.conf"
          permissions = "0644"
          content     = file("${path.module}/boot/aws.conf")
        },
        {
          path        = "/etc/systemd/system/flashmoe-prepare.service"
          permissions = "0644"
          content     = file("${path.module}/boot/flashmoe-prepare.service")
        },
      ]
    )
    runcmd = [["/usr/local/lib/flashmoe/install"]]
  }
}

resource "aws_instance" "server" {
  ami                         = var.ami_id == null ? nonsensitive(data.aws_ssm_parameter.ubuntu[0].value) : var.ami_id
  instance_type               = local.size.instance_type
  subnet_id                   = aws_subnet.private.id
  vpc_security_group_ids      = [aws_security_group.server.id]
  iam_instance_profile        = aws_iam_instance_profile.server.name
  associate_public_ip_address = false
  key_name                    = var.ssh_key_name
  ebs_optimized               = true
  monitoring                  = true # figures each minute, not each five

  user_data_base64            = base64gzip("#cloud-config\n${yamlencode(local.user_data)}")
  user_data_replace_on_change = true # it runs at an instance's first boot alone

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required" # IMDSv2
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = 30
    encrypted   = true
    kms_key_id  = var.volume_kms_key_arn
  }

  tags = { Name = var.name }

  lifecycle {
    ignore_changes = [ami] # a newer image is no reason to start anew
  }

  # The first boot needs the way out.
  depends_on = [
    aws_route.private,
    aws_route_table_association.private,
    aws_vpc_security_group_egress_rule.web,
    aws_iam_role_policy.server,
  ]
}

# Apart from the instance, so that a new one finds the model in its place.
resource "aws_ebs_volume" "models" {
  count             = local.volume == null ? 0 : 1
  availability_zone = local.zone
  type              = local.volume.type
  size              = local.volume.size_gib
  iops              = local.volume.iops
  throughput        = local.volume.throughput_mib
  encrypted         = true
  kms_key_id        = var.volume_kms_key_arn
  tags              = { Name = "${var.name}-models" }
}

resource "aws_volume_attachment" "models" {
  count                          = local.volume == null ? 0 : 1
  device_name                    = "/dev/sdf"
  volume_id                      = aws_ebs_volume.models[0].id
  instance_id                    = aws_instance.server.id
  stop_instance_before_detaching = true
}
