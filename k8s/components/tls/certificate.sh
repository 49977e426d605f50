#!/usr/bin/env bash
# certificate.sh AUTHORITY FOLDER [NAME]: a pod's certificate, for the address in POD_IP and a name that others know it by. From the
# folder AUTHORITY it takes ca.crt and ca.key, to FOLDER it writes tls.key, tls.crt and ca.crt. Needs bash and openssl.
set -euo pipefail
authority=$1 folder=$2 name=${3:-}
: "${POD_IP:?is not set: the address that others reach this pod by}"
umask 077

# 825 days, or as long as the authority's own where that ends sooner: a pod that starts anew has a new one.
openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$folder/tls.key"
openssl req -new -config /dev/null -key "$folder/tls.key" -subj "/CN=outrider pod" \
  | openssl x509 -req -CA "$authority/ca.crt" -CAkey "$authority/ca.key" -set_serial "0x$(openssl rand -hex 16)" -sha256 -days 825 \
    -out "$folder/tls.crt" -extfile /dev/fd/3 3<< END
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:$POD_IP, IP:127.0.0.1, DNS:localhost${name:+, DNS:$name}
END
cp "$authority/ca.crt" "$folder/ca.crt"
