output "instance_id" {
  description = "The instance."
  value       = aws_instance.server.id
}

output "private_ip" {
  description = "Where the server listens when client_cidrs is given."
  value       = aws_instance.server.private_ip
}

output "shell" {
  description = "Opens a shell through SSM."
  value       = "aws ssm start-session --region ${var.region} --target ${aws_instance.server.id}"
}

output "tunnel" {
  description = "Makes the server this machine's port 8000; null where it listens on its private address."
  value = local.listen == "private" ? null : join(" ", [
    "aws ssm start-session --region ${var.region} --target ${aws_instance.server.id}",
    "--document-name AWS-StartPortForwardingSession",
    "--parameters portNumber=${var.port},localPortNumber=8000",
  ])
}

output "url" {
  description = "The API for clients in client_cidrs, or through the tunnel."
  value       = local.listen == "private" ? "http://${aws_instance.server.private_ip}:${var.port}/v1" : "http://127.0.0.1:8000/v1"
}

output "dashboard" {
  description = "The CloudWatch dashboard."
  value       = "https://${var.region}.console.aws.amazon.com/cloudwatch/home?region=${var.region}#dashboards:name=${aws_cloudwatch_dashboard.this.dashboard_name}"
}

output "volume_id" {
  description = "The volume with the model; null where the instance's own drives are used."
  value       = one(aws_ebs_volume.models[*].id)
}
