#!/usr/bin/env bash
# The secrets of a deployment, made anew: Redis passwords and rights, a certificate, Ray's token, API keys. Needs bash and openssl.
set -euo pipefail

usage() {
  cat << 'END'
k8s/secrets.sh [--tenant NAME] [--days N] | kubectl apply -f -

Prints the Secrets that k8s/base asks for, with new random values each time, for the namespace outrider:
  outrider-cache      secret of the names in Redis, and the password of Redis' user outrider
  outrider-keys       keys.yaml (tenancy.keys_file): hashes of one tenant's key and of an admin key
  outrider-redis-acl  users.acl: what that user may do; user probe, for readiness, may ping
  outrider-redis-tls  a certificate for Redis, and that of the authority that signed it, whose own key is thrown away
  outrider-gcs-redis  password of the Redis in which Ray's head keeps its state
  outrider-ray-token  Ray's token
The two API keys are shown on stderr, once: the Secrets hold their hashes only.

  --tenant NAME  whose key it is: 1 to 64 characters out of A-Z a-z 0-9 _ . - (default: default)
  --days N       how long the certificate is valid (default: 825)

Applied to a cluster that runs, it replaces everything: docs/operations.md says what has to start anew.
END
}

refuse() {
  echo "secrets: $1" >&2
  exit 2
}

tenant=default days=825
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --tenant | --days) [ $# -gt 1 ] || refuse "$1 needs a value: k8s/secrets.sh --help"; printf -v "${1#--}" %s "$2"; shift 2 ;;
    --tenant=* | --days=*) name=${1%%=*}; printf -v "${name#--}" %s "${1#*=}"; shift ;;
    *) refuse "unknown option $1: k8s/secrets.sh --help" ;;
  esac
done
[[ $tenant =~ ^[A-Za-z0-9_.-]{1,64}$ && $tenant != . && $tenant != .. ]] \
  || refuse "--tenant '$tenant' cannot name a tenant; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . -"
[[ $days =~ ^[1-9][0-9]{0,4}$ ]] || refuse "--days '$days' is not a number of days; allowed: 1 to 99999"
command -v openssl > /dev/null || { echo "secrets: openssl not found: install it (apt-get install openssl)" >&2; exit 1; }

umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# stdin's SHA-256 in hexadecimal
digest() { openssl dgst -sha256 -r | cut -d ' ' -f 1; }

# A key as `outrider new-key` makes it.
new_key() { openssl rand -base64 32 | tr -- '+/' '-_' | sed 's/^/outrider-/; s/=*$//'; }

# A Secret: its name, then pairs of a key and a value, which may have several lines.
secret() {
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  namespace: outrider\n' "$1"
  printf '  labels: {app.kubernetes.io/part-of: outrider}\ntype: Opaque\nstringData:\n'
  shift
  while [ $# -gt 0 ]; do
    printf '  %s: |-\n' "$1"
    printf '%s\n' "$2" | sed 's/^/    /'
    shift 2
  done
}

# openssl, whose words are shown when it fails and are of no interest otherwise
quiet() { openssl "$@" 2> "$folder/said" || { echo "secrets: openssl $1 failed: $(cat "$folder/said")" >&2; exit 1; }; }

# tls.key, tls.crt and ca.crt in $folder
certificate() (
  cd "$folder"
  cat > conf << 'END'
[req]
distinguished_name = name
prompt = no
[name]
CN = outrider-redis
[authority]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:outrider-redis, DNS:outrider-redis.outrider, DNS:outrider-redis.outrider.svc, DNS:localhost
END
  for owner in ca tls; do
    quiet ecparam -name prime256v1 -genkey -noout -out $owner.key
  done
  quiet req -x509 -new -config conf -extensions authority -subj "/CN=outrider-redis authority" -sha256 -days "$days" \
    -key ca.key -out ca.crt
  quiet req -new -config conf -sha256 -key tls.key -out tls.csr
  quiet x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -sha256 -days "$days" \
    -extfile conf -extensions server -out tls.crt
)

# All before the first line is printed: a fault may not leave half of them.
password=$(openssl rand -hex 32)
password_hash=$(printf %s "$password" | digest)
cache_secret=$(openssl rand -hex 32)
gcs_password=$(openssl rand -hex 32)
ray_token=$(openssl rand -hex 32)
tenant_key=$(new_key)
tenant_hash=$(printf %s "$tenant_key" | digest)
admin_key=$(new_key)
admin_hash=$(printf %s "$admin_key" | digest)
certificate
tls_crt=$(cat "$folder/tls.crt")
tls_key=$(cat "$folder/tls.key")
ca_crt=$(cat "$folder/ca.crt")
ends=$(openssl x509 -in "$folder/tls.crt" -noout -enddate)

secret outrider-cache OUTRIDER_CACHE_SECRET "$cache_secret" OUTRIDER_REDIS_PASSWORD "$password"
secret outrider-keys keys.yaml "tenants:
  \"$tenant\": {keys: [\"sha256:$tenant_hash\"]}
admin_keys: [\"sha256:$admin_hash\"]"
# The rights of user outrider are those of README, Which Redis.
secret outrider-redis-acl users.acl "user default off resetkeys resetchannels -@all
user probe on >probe resetkeys resetchannels -@all +ping
user outrider on #$password_hash resetkeys ~{outrider}:* resetchannels -@all +ping +eval +xadd +xread +xtrim +xlen +xinfo|stream\
 +memory|usage +info +bgrewriteaof +get +set +incr +expire +persist +exists +hset +hget +hmget +del +unlink"
secret outrider-redis-tls tls.crt "$tls_crt" tls.key "$tls_key" ca.crt "$ca_crt"
secret outrider-gcs-redis password "$gcs_password"
secret outrider-ray-token auth_token "$ray_token"

cat >&2 << END
secrets: API key of tenant $tenant: $tenant_key
secrets: admin API key: $admin_key
secrets: they are kept nowhere, the Secrets hold their hashes: put them where you keep passwords
secrets: the certificate of Redis ends on ${ends#notAfter=}
END
