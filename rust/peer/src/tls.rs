//! Certificates: of the server, of clients, and whom each side trusts.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::{PeerError, PeerErrorKind, Result};

/// What a server shows and demands, in PEM.
#[derive(Clone, Default)]
pub struct ServerTls {
    /// Its certificate, with those between it and the authority.
    pub certificate: Vec<u8>,
    /// The certificate's private key.
    pub key: Vec<u8>,
    /// If given, only clients with a certificate of this authority are served (mTLS).
    pub client_authority: Option<Vec<u8>>,
}

/// What a client trusts and shows, in PEM.
#[derive(Clone, Default)]
pub struct ClientTls {
    /// The authority of the servers' certificates. The system's own authorities are not asked.
    pub authority: Vec<u8>,
    /// Its certificate and private key, for servers that demand one (mTLS).
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The name in the server's certificate, if it is not the host of the address.
    pub server_name: Option<String>,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerTls").field("is_mutual", &self.client_authority.is_some()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

/// TLS 1.3 by ring.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn settings(peer: &str, found: impl Into<String>, expected: &str) -> PeerError {
    PeerError::new(PeerErrorKind::Settings, peer, found, expected)
}

fn certificates(peer: &str, pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let bad = |found: String| settings(peer, format!("{found} in the PEM of {what}"), "one or more certificates");
    let read = read.map_err(|error| bad(error.to_string()))?;
    if read.is_empty() { Err(bad("no certificate".to_owned())) } else { Ok(read) }
}

fn key(peer: &str, pem: &[u8]) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|error| settings(peer, format!("{error} in the PEM of the private key"), "one private key"))
}

fn roots(peer: &str, pem: &[u8]) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(peer, pem, "the authority")? {
        roots.add(certificate).map_err(|error| settings(peer, error.to_string(), "an authority's certificate"))?;
    }
    Ok(Arc::new(roots))
}

impl ServerTls {
    pub(crate) fn config(&self, peer: &str) -> Result<Arc<ServerConfig>> {
        let failed = |error: String| settings(peer, error, "a certificate with its key");
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| failed(error.to_string()))?;
        let builder = match &self.client_authority {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots(peer, authority)?, provider())
                    .build()
                    .map_err(|error| failed(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let chain = certificates(peer, &self.certificate, "the certificate")?;
        let mut config =
            builder.with_single_cert(chain, key(peer, &self.key)?).map_err(|error| failed(error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ClientTls {
    pub(crate) fn config(&self, peer: &str) -> Result<Arc<ClientConfig>> {
        let failed = |error: String| settings(peer, error, "a certificate with its key");
        let verifier = WebPkiServerVerifier::builder_with_provider(roots(peer, &self.authority)?, provider())
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| failed(error.to_string()))?
            .with_webpki_verifier(verifier);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, private)) => builder
                .with_client_auth_cert(certificates(peer, certificate, "the identity")?, key(peer, private)?)
                .map_err(|error| failed(error.to_string()))?,
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}
