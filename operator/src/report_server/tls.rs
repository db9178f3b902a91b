//! TLS of the report server: reloads the certificate when its files change, and limits connections.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant, SystemTime};

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use super::peers::{PEER_CONNECTIONS_MAX, Peers, Warnings};

/// Concurrent connections.
const CONNECTIONS_MAX: usize = 8_192;
/// Time limit for a handshake and for the headers of a request.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Interval at which the files are checked for changes.
const RELOAD_INTERVAL: Duration = Duration::from_secs(30);

/// Files of a certificate and its key.
#[derive(Clone, Debug)]
pub struct Files {
    /// Certificate chain, the server's own certificate first.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

impl Files {
    /// Builds the TLS configuration from the current files.
    ///
    /// # Errors
    ///
    /// A file cannot be read or has invalid contents.
    pub fn load(&self) -> Result<Arc<ServerConfig>, String> {
        let failed =
            |path: &Path, why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let certs = CertificateDer::pem_file_iter(&self.cert)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| failed(&self.cert, &error))?;
        let key =
            PrivateKeyDer::from_pem_file(&self.key).map_err(|error| failed(&self.key, &error))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_single_cert(certs, key)
            .map_err(|error| failed(&self.cert, &error))?;
        Ok(Arc::new(config))
    }

    fn modified_at(&self) -> Option<SystemTime> {
        let time =
            |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        time(&self.cert).max(time(&self.key))
    }
}

/// Serves `router` over TLS until `stop` is set or the reload task ends.
pub async fn serve(
    listener: TcpListener,
    files: Files,
    config: Arc<ServerConfig>,
    router: Router,
    mut stop: watch::Receiver<bool>,
) {
    let current = Arc::new(RwLock::new(config));
    let mut reloads = tokio::spawn(reload(files, current.clone()));
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let peers = Peers::default();
    let mut warnings = Warnings::default();
    loop {
        let Ok(permit) = connections.clone().acquire_owned().await else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|is_set| *is_set) => break,
            _ = &mut reloads => break,
        };
        let Ok((stream, address)) = accepted else {
            // Usually too many open files. Wait, since trainers retry.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Close a connection over the limit at once: trainers retry.
        let Some(connection) = peers.connect(address.ip()) else {
            if warnings.is_due(Instant::now()) {
                let (address, max) = (address.ip(), PEER_CONNECTIONS_MAX);
                tracing::warn!(%address, max, "closed a connection: its address has too many");
            }
            continue;
        };
        let config = current.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let router = router.clone();
        tokio::spawn(async move {
            let handshake = TlsAcceptor::from(config).accept(stream);
            let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_MAX, handshake).await else {
                return;
            };
            let mut builder = Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(HANDSHAKE_MAX);
            let service = TowerToHyperService::new(router);
            // Ignore errors: the trainer reconnects.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            drop((permit, connection));
        });
    }
    reloads.abort();
}

async fn reload(files: Files, current: Arc<RwLock<Arc<ServerConfig>>>) {
    let mut loaded_at = files.modified_at();
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        let modified_at = files.modified_at();
        if modified_at == loaded_at {
            continue;
        }
        match files.load() {
            Ok(config) => {
                *current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = config;
                loaded_at = modified_at;
                tracing::info!("reloaded the TLS certificate");
            }
            Err(error) => tracing::warn!(error, "cannot reload the TLS certificate"),
        }
    }
}
