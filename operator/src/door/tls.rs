//! The door's TLS: a certificate that is read again when its files change, and connections with
//! limits.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

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

/// Connections at a time.
const CONNECTIONS_MAX: usize = 8_192;
/// Time for a handshake, and for the headers of a request.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(30);

/// A certificate and its key, by their files.
#[derive(Clone, Debug)]
pub struct Files {
    /// The certificates, the door's own first.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

impl Files {
    /// A server's settings by what the files hold now.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or holds something else.
    pub fn load(&self) -> Result<Arc<ServerConfig>, String> {
        let failed =
            |path: &Path, why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let certs = CertificateDer::pem_file_iter(&self.cert)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|it| failed(&self.cert, &it))?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|it| failed(&self.key, &it))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|it| it.to_string())?
            .with_no_client_auth()
            .with_single_cert(certs, key)
            .map_err(|it| failed(&self.cert, &it))?;
        Ok(Arc::new(config))
    }

    fn changed(&self) -> Option<SystemTime> {
        let time = |path: &Path| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        time(&self.cert).max(time(&self.key))
    }
}

/// Serves `router` over TLS until `stop` says so, or until the certificate is no longer reloaded.
pub async fn serve(
    listener: TcpListener,
    files: Files,
    config: Arc<ServerConfig>,
    router: Router,
    mut stop: watch::Receiver<bool>,
) {
    let current = Arc::new(RwLock::new(config));
    let mut reloads = tokio::spawn(reload(files, current.clone()));
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|it| *it) => break,
            _ = &mut reloads => break,
        };
        let Ok((stream, _)) = accepted else {
            // Too many files are open, or the like: it passes, and trainers try again.
            tokio::time::sleep(Duration::from_millis(100)).await;
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
            // A connection that was cut is tried again by whoever made it.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            drop(permit);
        });
    }
    reloads.abort();
}

async fn reload(files: Files, current: Arc<RwLock<Arc<ServerConfig>>>) {
    let mut seen = files.changed();
    loop {
        tokio::time::sleep(LOOK).await;
        let changed = files.changed();
        if changed == seen {
            continue;
        }
        match files.load() {
            Ok(config) => {
                *current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = config;
                seen = changed;
                tracing::info!("the door's certificate was read again");
            }
            Err(error) => tracing::warn!(error, "the door's certificate cannot be read again"),
        }
    }
}
