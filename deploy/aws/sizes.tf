# The three sizes of the paper's deployment guide. `read_mib_per_second`: the least of what AWS
# gives for the volume and for the instance, in bursts where it says "up to"; not measured by us.
locals {
  sizes = {
    small = {
      instance_type       = "g5.xlarge" # 4 vCPU, 16 GiB
      volume              = { type = "gp3", size_gib = 250, iops = 3000, throughput_mib = 500 }
      read_mib_per_second = 417 # the instance: up to 3.5 Gbit/s
    }
    medium = {
      instance_type       = "g6.2xlarge" # 8 vCPU, 32 GiB
      volume              = { type = "io2", size_gib = 500, iops = 16000, throughput_mib = null }
      read_mib_per_second = 596 # the instance: up to 5 Gbit/s
    }
    large = {
      instance_type       = "p4d.24xlarge" # 96 vCPU, 1152 GiB
      volume              = null           # RAID-0 of its eight NVMe drives, made at boot
      read_mib_per_second = 15258          # 16 GB/s
    }
  }

  size   = local.sizes[var.size]
  volume = local.size.volume
  listen = length(var.client_cidrs) > 0 ? "private" : "loopback"

  zone      = coalesce(var.availability_zone, data.aws_availability_zones.here.names[0])
  partition = data.aws_partition.here.partition
  account   = data.aws_caller_identity.here.account_id

  # Of s3://bucket/folder/name: the bucket, and the ARNs that may be read.
  wheels_bucket = regex("^s3://([^/]+)/", var.wheels)[0]
  wheels_prefix = regex("^s3://[^/]+/(.+)$", var.wheels)[0]
  model_in_s3   = startswith(var.model, "s3://")
  model_bucket  = try(regex("^s3://([^/]+)/", var.model)[0], null)
  # Shards lie beside the first one and begin like it.
  model_prefix = try(replace(regex("^s3://[^/]+/(.+)\\.gguf$", var.model)[0], "/-[0-9]{5}-of-[0-9]{5}$/", ""), null)
}

data "aws_availability_zones" "here" {
  state = "available"
}

data "aws_partition" "here" {}

data "aws_caller_identity" "here" {}
