#!/bin/bash
# Each start: the API key from Parameter Store or Secrets Manager into memory that only root can read.
set -euo pipefail
root=${FLASHMOE_ROOT:-} # for tests
source "$root/etc/flashmoe/deploy.env"
umask 077

if [[ $API_KEY_SOURCE == ssm ]]; then
    key=$(aws ssm get-parameter --name "$API_KEY_NAME" --with-decryption \
        --query Parameter.Value --output text)
else
    key=$(aws secretsmanager get-secret-value --secret-id "$API_KEY_NAME" \
        --query SecretString --output text)
fi
if ! [[ $key =~ ^[A-Za-z0-9._~+/=-]{16,512}$ ]]; then
    echo "$API_KEY_NAME: a key has 16 to 512 letters, digits and . _ ~ + / = -" >&2
    exit 1
fi
mkdir -p "$root/run/flashmoe"
printf 'FLASHMOE_API_KEY=%s\n' "$key" >"$root/run/flashmoe/key.env"
