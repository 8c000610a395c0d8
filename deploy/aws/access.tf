# What the instance may do: be reached through SSM, read its model, its wheels and its key, and send
# figures into one namespace.
data "aws_iam_policy_document" "assume" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "server" {
  name_prefix        = "${var.name}-"
  assume_role_policy = data.aws_iam_policy_document.assume.json
}

resource "aws_iam_instance_profile" "server" {
  name_prefix = "${var.name}-"
  role        = aws_iam_role.server.name
}

resource "aws_iam_role_policy_attachment" "ssm" {
  role       = aws_iam_role.server.name
  policy_arn = "arn:${local.partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

data "aws_iam_policy_document" "server" {
  statement {
    sid       = "ReadWheels"
    actions   = ["s3:GetObject"]
    resources = ["arn:${local.partition}:s3:::${local.wheels_bucket}/${local.wheels_prefix}/*"]
  }

  dynamic "statement" {
    for_each = local.model_in_s3 ? [1] : []
    content {
      sid       = "ReadModel"
      actions   = ["s3:GetObject"]
      resources = ["arn:${local.partition}:s3:::${local.model_bucket}/${local.model_prefix}*"]
    }
  }

  statement {
    sid     = "ListBuckets"
    actions = ["s3:ListBucket"]
    resources = [
      for bucket in distinct(compact([local.wheels_bucket, local.model_bucket])) :
      "arn:${local.partition}:s3:::${bucket}"
    ]
  }

  statement {
    sid       = "SendFigures"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"] # this action knows no narrower one
    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = [var.namespace]
    }
  }

  statement {
    sid     = "ReadKey"
    actions = [var.api_key_source == "ssm" ? "ssm:GetParameter" : "secretsmanager:GetSecretValue"]
    resources = [
      var.api_key_source == "ssm"
      ? "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter/${trimprefix(var.api_key_name, "/")}"
      # six characters that AWS adds to a secret's name
      : "arn:${local.partition}:secretsmanager:${var.region}:${local.account}:secret:${var.api_key_name}-??????"
    ]
  }

  dynamic "statement" {
    for_each = var.api_key_kms_key_arn == null ? [] : [var.api_key_kms_key_arn]
    content {
      sid       = "DecryptKey"
      actions   = ["kms:Decrypt"]
      resources = [statement.value]
    }
  }
}

# AmazonSSMManagedInstanceCore lets it read every parameter; the key of this server is enough.
data "aws_iam_policy_document" "no_other_parameters" {
  statement {
    sid     = "NoOtherParameters"
    effect  = "Deny"
    actions = ["ssm:GetParameter", "ssm:GetParameters", "ssm:GetParametersByPath"]
    not_resources = [
      "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter/${trimprefix(var.api_key_name, "/")}"
    ]
  }
}

resource "aws_iam_role_policy" "server" {
  name   = "server"
  role   = aws_iam_role.server.id
  policy = data.aws_iam_policy_document.server.json
}

resource "aws_iam_role_policy" "no_other_parameters" {
  name   = "no-other-parameters"
  role   = aws_iam_role.server.id
  policy = data.aws_iam_policy_document.no_other_parameters.json
}
