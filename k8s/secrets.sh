#!/usr/bin/env bash
# The secrets of a deployment, made anew: Redis passwords and rights, certificates, Ray's token, API keys. Needs bash and openssl.
set -euo pipefail

usage() {
  cat << 'END'
k8s/secrets.sh [--tenant NAME] [--days N] | kubectl apply -f -

Prints the Secrets that k8s/base asks for, with new random values each time, for the namespace outrider:
  outrider-cache          secret of the names in Redis, and the password of Redis' user outrider
  outrider-keys           keys.yaml (tenancy.keys_file): hashes of one tenant's key and of an admin key
  outrider-redis-acl      users.acl: what that user may do; user probe, for readiness, may ping
  outrider-redis-tls      a certificate for Redis, and that of the authority that signed it, whose own key is thrown away
  outrider-gcs-redis      password of the Redis in which Ray's head keeps its state
  outrider-gcs-redis-tls  a certificate for that Redis, of the same authority
  outrider-ray-token      Ray's token
  outrider-ray-tls        an authority with its key, of which each of Ray's pods has a certificate made as it starts (k8s/components/tls)
The two API keys are shown on stderr, once: the Secrets hold their hashes only.

  --tenant NAME  whose key it is: 1 to 64 characters out of A-Z a-z 0-9 _ . - (default: default)
  --days N       how long the certificates are valid (default: 825)

Applied to a cluster that runs, it replaces everything: docs/upgrade.md, Rotate keys, says what has to start anew.
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

# An authority's certificate and key, NAME.crt and NAME.key in $folder
authority() (
  cd "$folder"
  cat > conf << 'END'
[req]
distinguished_name = name
prompt = no
[name]
CN = outrider
[authority]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
END
  quiet ecparam -name prime256v1 -genkey -noout -out "$1.key"
  quiet req -x509 -new -config conf -extensions authority -subj "/CN=$1 authority" -sha256 -days "$days" -key "$1.key" -out "$1.crt"
)

# A Service's certificate and key, NAME.crt and NAME.key in $folder, of the authority of Redis
certificate() (
  cd "$folder"
  cat > conf << END
[req]
distinguished_name = name
prompt = no
[name]
CN = $1
[server]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = DNS:$1, DNS:$1.outrider, DNS:$1.outrider.svc, DNS:localhost
END
  quiet ecparam -name prime256v1 -genkey -noout -out "$1.key"
  quiet req -new -config conf -sha256 -key "$1.key" -out "$1.csr"
  quiet x509 -req -in "$1.csr" -CA redis.crt -CAkey redis.key -set_serial "0x$(openssl rand -hex 16)" -sha256 -days "$days" \
    -extfile conf -extensions server -out "$1.crt"
)

# A Secret of a Service's certificate, NAME-tls.
tls_secret() { secret "$1-tls" tls.crt "$(cat "$folder/$1.crt")" tls.key "$(cat "$folder/$1.key")" ca.crt "$(cat "$folder/redis.crt")"; }

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
authority redis
authority ray
certificate outrider-redis
certificate outrider-gcs-redis
ends=$(openssl x509 -in "$folder/outrider-redis.crt" -noout -enddate)

secret outrider-cache OUTRIDER_CACHE_SECRET "$cache_secret" OUTRIDER_REDIS_PASSWORD "$password"
secret outrider-keys keys.yaml "tenants:
  \"$tenant\": {keys: [\"sha256:$tenant_hash\"]}
admin_keys: [\"sha256:$admin_hash\"]"
# The rights of user outrider are those of README, Which Redis.
secret outrider-redis-acl users.acl "user default off resetkeys resetchannels -@all
user probe on >probe resetkeys resetchannels -@all +ping
user outrider on #$password_hash resetkeys ~{outrider}:* resetchannels -@all +ping +eval +xadd +xread +xtrim +xlen +xinfo|stream\
 +memory|usage +info +bgrewriteaof +get +set +incr +expire +persist +exists +hset +hget +hmget +del +unlink"
tls_secret outrider-redis
secret outrider-gcs-redis password "$gcs_password"
tls_secret outrider-gcs-redis
secret outrider-ray-token auth_token "$ray_token"
secret outrider-ray-tls ca.crt "$(cat "$folder/ray.crt")" ca.key "$(cat "$folder/ray.key")"

cat >&2 << END
secrets: API key of tenant $tenant: $tenant_key
secrets: admin API key: $admin_key
secrets: they are kept nowhere, the Secrets hold their hashes: put them where you keep passwords
secrets: the certificates of both Redis, and the authority of Ray's pods, end on ${ends#notAfter=}
END
