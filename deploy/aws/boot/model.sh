#!/bin/bash
# Each boot: the model in /srv/models, and the server's config file. What is there is not fetched again.
set -euo pipefail
root=${FLASHMOE_ROOT:-} # for tests
source "$root/etc/flashmoe/deploy.env"
folder=$root/srv/models

if [[ $MODEL == s3://* ]]; then
    name=${MODEL##*/}
    pattern=$name
    if [[ $name =~ ^(.*)-[0-9]{5}-of-([0-9]{5})\.gguf$ ]]; then
        pattern="${BASH_REMATCH[1]}-?????-of-${BASH_REMATCH[2]}.gguf"
    fi
    aws s3 sync "${MODEL%/*}/" "$folder/" --size-only --no-progress --exclude '*' --include "$pattern"
    path=$folder/$name
else
    path=$("$root/opt/flashmoe/bin/flashmoe" pull "$MODEL" -o "$folder")
fi
[[ -f $path ]] || { echo "there is no $path" >&2; exit 1; }
chmod -R a+rX "$folder"

host=127.0.0.1
if [[ $LISTEN == private ]]; then
    imds=http://169.254.169.254/latest
    token=$(curl -sf -X PUT "$imds/api/token" -H 'X-aws-ec2-metadata-token-ttl-seconds: 60')
    host=$(curl -sf "$imds/meta-data/local-ipv4" -H "X-aws-ec2-metadata-token: $token")
fi

python3 - "$path" "$host" "$PORT" "$MODEL_NAME" "$RAM" "$CONTEXT" >"$root/etc/flashmoe/server.json.new" <<'PYTHON'
import json
import sys

path, host, port, name, ram, context = sys.argv[1:]
model = {"model": path, "model_alias": name, "n_ctx": int(context), "ram": ram}
print(json.dumps({"host": host, "port": int(port), "models": [model]}, indent=2))
PYTHON
chmod 0644 "$root/etc/flashmoe/server.json.new"
mv "$root/etc/flashmoe/server.json.new" "$root/etc/flashmoe/server.json"
