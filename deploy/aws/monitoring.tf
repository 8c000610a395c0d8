locals {
  dimensions = { ModelName = var.model_name }

  # Reads of the model's volume: EBS counts them per volume, EC2 for all of an instance's own drives.
  reads = local.volume == null ? {
    namespace  = "AWS/EC2"
    metric     = "DiskReadBytes"
    dimensions = { InstanceId = aws_instance.server.id }
    } : {
    namespace  = "AWS/EBS"
    metric     = "VolumeReadBytes"
    dimensions = { VolumeId = aws_ebs_volume.models[0].id }
  }
  read_alarm = coalesce(var.read_alarm_mib_per_second, floor(0.8 * local.size.read_mib_per_second))
}

resource "aws_cloudwatch_metric_alarm" "token_rate_low" {
  alarm_name          = "${var.name}-token-rate-low"
  alarm_description   = "Answers are decoded at less than ${var.token_rate_alarm} tokens per second. A server that nobody asks sends nothing, which is fine."
  namespace           = var.namespace
  metric_name         = "TokenThroughput"
  dimensions          = local.dimensions
  statistic           = "Average"
  period              = 60
  evaluation_periods  = 5
  datapoints_to_alarm = 3
  comparison_operator = "LessThanThreshold"
  threshold           = var.token_rate_alarm
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
}

resource "aws_cloudwatch_metric_alarm" "volume_read_high" {
  alarm_name          = "${var.name}-volume-read-high"
  alarm_description   = "The model's volume reads more than ${local.read_alarm} MiB/s: it is what limits the speed. More memory (ram) means fewer misses."
  evaluation_periods  = 15
  datapoints_to_alarm = 10
  comparison_operator = "GreaterThanThreshold"
  threshold           = local.read_alarm
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns

  metric_query {
    id          = "rate"
    expression  = "bytes / PERIOD(bytes) / 1048576"
    label       = "MiB/s"
    return_data = true
  }

  metric_query {
    id = "bytes"
    metric {
      namespace   = local.reads.namespace
      metric_name = local.reads.metric
      dimensions  = local.reads.dimensions
      stat        = "Sum"
      period      = 60
    }
  }
}

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = var.name
  dashboard_body = jsonencode({
    widgets = concat(
      [
        for index, figure in [
          { metric = "TokenThroughput", title = "Tokens per second of decoding", stat = "Average" },
          { metric = "CacheHitRate", title = "Cache hit rate, %", stat = "Average" },
          { metric = "ExpertLoadLatency", title = "Waited per miss, ms", stat = "Average" },
          { metric = "CacheEvictionCount", title = "Evictions per minute", stat = "Sum" },
          ] : {
          type   = "metric"
          x      = 12 * (index % 2)
          y      = 6 * floor(index / 2)
          width  = 12
          height = 6
          properties = {
            title   = figure.title
            region  = var.region
            view    = "timeSeries"
            stat    = figure.stat
            period  = 60
            yAxis   = { left = { min = 0 } }
            metrics = [[var.namespace, figure.metric, "ModelName", var.model_name]]
          }
        }
      ],
      [
        {
          type   = "metric"
          x      = 0
          y      = 12
          width  = 12
          height = 6
          properties = {
            title  = "Read from the model's volume, MiB/s"
            region = var.region
            view   = "timeSeries"
            period = 60
            yAxis  = { left = { min = 0 } }
            metrics = [
              [{ expression = "bytes / PERIOD(bytes) / 1048576", id = "rate", label = "MiB/s" }],
              concat(
                [local.reads.namespace, local.reads.metric],
                flatten([for name, value in local.reads.dimensions : [name, value]]),
                [{ id = "bytes", stat = "Sum", visible = false }]
              ),
            ]
          }
        },
        {
          type   = "alarm"
          x      = 12
          y      = 12
          width  = 12
          height = 6
          properties = {
            title = "Alarms"
            alarms = [
              aws_cloudwatch_metric_alarm.token_rate_low.arn,
              aws_cloudwatch_metric_alarm.volume_read_high.arn,
            ]
          }
        },
      ]
    )
  })
}
