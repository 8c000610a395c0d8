#!/bin/sh
# What the README shows, one after the other.
set -eu
URL=${FLASHMOE_URL:-http://127.0.0.1:8000}
KEY=${FLASHMOE_API_KEY:-none}

ask() {
    curl --fail-with-body --silent --show-error --no-buffer -H "Authorization: Bearer $KEY" "$@"
    echo
}

ask "$URL/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "max_tokens": 32, "temperature": 0
}'
ask "$URL/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "Count to three."}],
  "max_tokens": 32, "temperature": 0, "stream": true
}'
ask "$URL/v1/embeddings" -d '{"input": "one vector for this text"}'
ask "$URL/health"
ask "$URL/metrics"
