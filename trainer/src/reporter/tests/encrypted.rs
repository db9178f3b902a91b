//! Report servers behind TLS. The files in `tls` belong to a CA that signs nothing else; its key
//! was deleted. `door.key` is used in this test only. The certificate is for the address 127.0.0.1.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stoker_api::contract::{Directive, TrialConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{Reporter, progress, until};

const CA: &str = include_str!("tls/ca.pem");
const OTHER_CA: &str = include_str!("tls/other-ca.pem");

/// Numbers of TLS handshakes of a server. A client that does not trust its certificate fails one.
#[derive(Debug, Default)]
struct Handshakes {
    completed: AtomicUsize,
    failed: AtomicUsize,
}

/// Responds to each request with a directive.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor, handshakes: Arc<Handshakes>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, handshakes) = (acceptor.clone(), handshakes.clone());
        tokio::spawn(async move {
            let accepted = acceptor.accept(stream).await;
            let Handshakes { completed, failed } = &*handshakes;
            let counter = if accepted.is_ok() { completed } else { failed };
            counter.fetch_add(1, Ordering::SeqCst);
            let Ok(mut stream) = accepted else { return };
            let mut request = vec![];
            while !request.ends_with(b"}}}") {
                if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                    return;
                }
            }
            let head = "HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: 6\r\n\r\n\"stop\"";
            let _ = stream.write_all(head.as_bytes()).await;
            let _ = stream.shutdown().await;
        });
    }
}

fn start_server(rt: &Runtime) -> (SocketAddr, Arc<Handshakes>) {
    let certificate = CertificateDer::from_pem_slice(include_bytes!("tls/door.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("tls/door.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let listener = rt.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let handshakes = Arc::<Handshakes>::default();
    rt.spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), handshakes.clone()));
    (address, handshakes)
}

fn config(url: &str, ca: Option<&str>, folder: &tempfile::TempDir) -> TrialConfig {
    let token = folder.path().join("token");
    std::fs::write(&token, "one\n").unwrap();
    serde_json::from_value(serde_json::json!({
        "version": 1, "experiment": "mnist", "experimentId": "id-1", "trial": 4,
        "attempt": 2, "seed": 1, "experimentSeed": 1, "hyperparameters": {},
        "unit": "batches", "units": 10, "metric": "loss", "smallerIsBetter": true,
        "schedulingUnit": 1, "aggregationFrequency": 1,
        "storage": {"url": "memory://", "trialPath": "t"},
        "door": {"url": url, "tokenFile": token, "ca": ca},
    }))
    .unwrap()
}

#[test]
fn only_the_trusted_server_receives_reports() {
    let (rt, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    // Each reporter has a separate server, which counts only the connections of this reporter.
    let connect = |host: &str, ca: Option<&str>| {
        let (address, handshakes) = start_server(&rt);
        let config = config(&format!("https://{host}:{}/report", address.port()), ca, &folder);
        (Reporter::new(rt.handle().clone(), &config).unwrap(), handshakes)
    };
    let both = format!("{OTHER_CA}{CA}");
    for ca in [CA, &both] {
        let (reporter, _) = connect("127.0.0.1", Some(ca));
        assert_eq!(reporter.post_and_wait(1, progress()), Ok(Some(Directive::Stop)), "{ca}");
    }
    for (host, ca) in [("127.0.0.1", Some(OTHER_CA)), ("127.0.0.1", None), ("localhost", Some(CA))]
    {
        let (reporter, handshakes) = connect(host, ca);
        reporter.post(1, progress());
        let num = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
        let has_ended = || num(&handshakes.failed) + num(&handshakes.completed) > 0;
        until("the first TLS handshake", has_ended);
        assert_eq!(num(&handshakes.completed), 0, "{host}, {ca:?}");
        assert_eq!(reporter.directive(), None, "{host}, {ca:?}");
    }
}

#[test]
fn invalid_ca_is_refused_at_once() {
    let (rt, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let cut = CA.replace("MII", "M!!");
    for ca in ["", "no certificate", &cut] {
        let config = config("https://127.0.0.1:1/", Some(ca), &folder);
        let error = Reporter::new(rt.handle().clone(), &config).unwrap_err();
        assert!(error.to_string().contains("CA"), "{ca}: {error}");
        let code = crate::error::exit_code(&*error);
        assert_eq!(code, stoker_api::contract::ExitCode::Infrastructure);
    }
}
