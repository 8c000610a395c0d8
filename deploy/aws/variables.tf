variable "size" {
  description = "small: g5.xlarge with a gp3 volume; medium: g6.2xlarge with an io2 volume; large: p4d.24xlarge with its own drives as RAID-0."
  type        = string

  validation {
    condition     = contains(["small", "medium", "large"], var.size)
    error_message = "The size is small, medium or large."
  }
}

variable "region" {
  description = "AWS region, such as eu-central-1."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "The region looks like eu-central-1."
  }
}

variable "availability_zone" {
  description = "Zone of the instance and its volume; null: the region's first. Not every zone has every instance type."
  type        = string
  default     = null
}

variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "flashmoe"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,30}$", var.name))
    error_message = "The name has lower-case letters, digits and hyphens, 31 at most, and begins with a letter."
  }
}

variable "wheels" {
  description = "Folder in S3 with the two wheels that deploy/Dockerfile exports: s3://bucket/folder."
  type        = string

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$", var.wheels))
    error_message = "The wheels are in a folder such as s3://bucket/folder, without a slash at the end."
  }
}

variable "model" {
  description = "A GGUF in S3 (s3://bucket/folder/name.gguf, of a sharded one the first shard), or a name that `flashmoe models` lists."
  type        = string

  validation {
    condition = (
      can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[A-Za-z0-9._/-]+\\.gguf$", var.model)) ||
      can(regex("^[a-z0-9][a-z0-9.-]*$", var.model))
    )
    error_message = "The model is s3://bucket/folder/name.gguf or a name such as gpt-oss-20b."
  }
}

variable "model_name" {
  description = "What clients call the model, and the ModelName of its figures."
  type        = string
  default     = "flashmoe"

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]{1,100}$", var.model_name))
    error_message = "The model's name has letters, digits and . _ -, 100 at most."
  }
}

variable "ram" {
  description = "Budget of the whole process, such as 12G; auto: what the instance has, less a tenth."
  type        = string
  default     = "auto"

  validation {
    condition     = can(regex("^(auto|[1-9][0-9]*[MG])$", var.ram))
    error_message = "The budget is auto or a size such as 12G."
  }
}

variable "context" {
  description = "Tokens of context."
  type        = number
  default     = 4096

  validation {
    condition     = var.context >= 256 && floor(var.context) == var.context
    error_message = "The context is a whole number of tokens, 256 at least."
  }
}

variable "port" {
  description = "Port of the server."
  type        = number
  default     = 8000

  validation {
    condition     = var.port >= 1024 && var.port <= 65535 && floor(var.port) == var.port
    error_message = "The port is from 1024 to 65535."
  }
}

variable "api_key_source" {
  description = "Where the API key is kept: ssm (Parameter Store, SecureString) or secretsmanager."
  type        = string
  default     = "ssm"

  validation {
    condition     = contains(["ssm", "secretsmanager"], var.api_key_source)
    error_message = "The key's source is ssm or secretsmanager."
  }
}

variable "api_key_name" {
  description = "Name of the parameter or secret, made beforehand: the key itself is in no file and no state of Terraform."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9/_.+=@-]{1,512}$", var.api_key_name))
    error_message = "The name of the key's parameter or secret, such as /flashmoe/api-key, not an ARN."
  }
}

variable "api_key_kms_key_arn" {
  description = "KMS key that encrypts the API key; null: AWS's own for the service."
  type        = string
  default     = null

  validation {
    condition     = var.api_key_kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:", var.api_key_kms_key_arn))
    error_message = "An ARN of a KMS key, or null."
  }
}

variable "volume_kms_key_arn" {
  description = "KMS key of the volumes; null: the account's default key for EBS. They are encrypted in any case."
  type        = string
  default     = null

  validation {
    condition     = var.volume_kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:", var.volume_kms_key_arn))
    error_message = "An ARN of a KMS key, or null."
  }
}

variable "client_cidrs" {
  description = "Private networks that may call the server. Empty: it listens on loopback, and is reached through SSM."
  type        = list(string)
  default     = []

  validation {
    condition = alltrue([
      for cidr in var.client_cidrs : can(cidrhost(cidr, 0)) &&
      can(regex("^(10\\.|192\\.168\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.)", cidr)) &&
      try(tonumber(split("/", cidr)[1]), 0) >= 8
    ])
    error_message = "Clients are in private networks such as 10.20.0.0/16."
  }
}

variable "ssh_cidrs" {
  description = "Private networks that may use SSH. Empty: no port 22 at all; SSM gives a shell."
  type        = list(string)
  default     = []

  validation {
    condition = alltrue([
      for cidr in var.ssh_cidrs : can(cidrhost(cidr, 0)) &&
      can(regex("^(10\\.|192\\.168\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.)", cidr)) &&
      try(tonumber(split("/", cidr)[1]), 0) >= 8
    ])
    error_message = "SSH is for private networks such as 10.20.0.0/16 only."
  }
}

variable "ssh_key_name" {
  description = "EC2 key pair for SSH; null: none."
  type        = string
  default     = null
}

variable "vpc_cidr" {
  description = "Addresses of the network that is made for it."
  type        = string
  default     = "10.77.0.0/24"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.vpc_cidr)[1]), 99) <= 26
    error_message = "An IPv4 network of /16 to /26."
  }
}

variable "ami_id" {
  description = "Image to start from, with apt, systemd, snap and the SSM agent; null: the current Ubuntu 24.04."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "An id such as ami-0123456789abcdef0, or null."
  }
}

variable "namespace" {
  description = "CloudWatch namespace of the server's figures."
  type        = string
  default     = "FlashMoE"

  validation {
    condition     = can(regex("^[A-Za-z0-9._/#:-]{1,255}$", var.namespace)) && !startswith(var.namespace, "AWS/") && !startswith(var.namespace, ":")
    error_message = "Letters, digits and . _ / # : -, 255 at most, not beginning with AWS/ or a colon."
  }
}

variable "token_rate_alarm" {
  description = "Alarm when answers are decoded slower than this, in tokens per second."
  type        = number
  default     = 2

  validation {
    condition     = var.token_rate_alarm > 0
    error_message = "A rate above zero."
  }
}

variable "read_alarm_mib_per_second" {
  description = "Alarm when the model's volume reads more than this on average; null: 80 % of what it can do."
  type        = number
  default     = null

  validation {
    condition     = var.read_alarm_mib_per_second == null || try(var.read_alarm_mib_per_second > 0, false)
    error_message = "A rate above zero, or null."
  }
}

variable "alarm_topic_arns" {
  description = "SNS topics that the alarms tell."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.alarm_topic_arns : can(regex("^arn:aws[a-z-]*:sns:", arn))])
    error_message = "ARNs of SNS topics."
  }
}
