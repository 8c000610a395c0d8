#!/bin/bash
# First boot: installs flashmoe-gguf from the wheels in S3, then starts it. Log: /var/log/cloud-init-output.log
set -euo pipefail
source /etc/flashmoe/deploy.env
export DEBIAN_FRONTEND=noninteractive HOME=/root

apt-get update
apt-get install -y --no-install-recommends curl libgomp1 mdadm python3-venv
export PATH=$PATH:/snap/bin
command -v aws >/dev/null || snap install aws-cli --classic

wheels=$(mktemp -d)
aws s3 cp --recursive --no-progress --exclude '*' --include '*.whl' "$WHEELS/" "$wheels/"
python3 -m venv /opt/flashmoe
ours=("$wheels"/flashmoe_gguf-*.whl)
/opt/flashmoe/bin/pip install --no-cache-dir --find-links "$wheels" "${ours[0]}[server,hub,aws]"
rm -r "$wheels"
/opt/flashmoe/bin/flashmoe --version

systemctl daemon-reload
systemctl enable flashmoe-prepare.service flashmoe.service
# The model may take an hour to come; cloud-init need not wait for it.
systemctl start --no-block flashmoe.service
