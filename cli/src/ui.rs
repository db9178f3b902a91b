//! `stoker ui`: a web page with experiments, jobs, plots and logs.
//!
//! ```text
//!   local records  -- [local]   --.      <-- [local_actions], [requests]: actions
//!   storage        -- [stored]  --|
//!                                 +--> stoker_ui::Store --> page
//!   cluster, watch -- [cluster] --'
//!   cluster, watches -- [shared] --> what each viewer may see --> page
//! ```

mod beside_run;
mod cluster;
mod local;
mod local_actions;
mod objects;
mod requests;
mod shared;
mod stored;
mod watch;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use rustix::io::Errno;
use rustix::net::sockopt;
use serde_json::json;
use stoker_ui::{Access, Site, Store, quoted};
use tokio::net::{TcpListener, TcpSocket};

pub(crate) use self::beside_run::start as start_beside_run;
use self::shared::{SharedArgs, SignInBy};
use crate::cluster::storage;
use crate::commands::SourceArgs;
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::open_files;
use crate::run::record::random_hex;
use crate::run::signals::Signals;
use crate::run_root::RunRoot;

/// Bytes of the random token.
const TOKEN_BYTES: usize = 16;
/// Number of threads: one viewer that loads many curves must not delay the others.
const THREADS: usize = 2;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Flag that sets the port of `stoker ui`.
const PORT_FLAG: &str = "--port N";

/// Arguments of `stoker ui`.
#[derive(Debug, Args)]
pub(crate) struct UiArgs {
    /// Port on the loopback interface; 0 selects a free one
    #[arg(long, value_name = "N", default_value_t = 8265)]
    port: u16,
    /// Show the experiments of all namespaces
    #[arg(long, short = 'A', help_heading = "Cluster")]
    all_namespaces: bool,
    /// Show buttons that pause, cancel, kill, delete and continue experiments; on a cluster, with
    /// the permissions of the kubeconfig
    #[arg(long)]
    allow_actions: bool,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    storage: storage::Options,
    #[command(flatten)]
    shared: SharedArgs,
}

/// Serves the page until a signal arrives.
pub(crate) fn serve(args: &UiArgs, output: Output) -> Result<u8, Failure> {
    // The page derives its limit of connections from the soft limit.
    open_files::raise();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| Failure::System(format!("cannot start the async runtime: {error}")))?;
    let served = runtime.block_on(serve_until_signal(args, output));
    // Do not wait for requests to a storage that does not answer.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map(|()| 0)
}

async fn serve_until_signal(args: &UiArgs, output: Output) -> Result<(), Failure> {
    if let Some(sign_in) = args.shared.sign_in {
        return serve_many(args, sign_in, output).await;
    }
    let mut signals = Signals::listen()?;
    let store = Arc::new(Store::default());
    let (listener, access) = listen(args.port, PORT_FLAG).await?;
    let address = address(&listener)?;
    let site = match args.source.is_cluster() {
        true => {
            let options = args.storage.clone();
            let (cluster, all) = (&args.source.cluster, args.all_namespaces);
            cluster::start(cluster, all, options, store.clone(), args.allow_actions).await?
        }
        false => start_local(args.source.root(), &store, args.allow_actions)?,
    };
    let url = format!("http://{address}/?token={}", access.token);
    announce(&url, &site.place, output);
    let end = async move { signals.next().await };
    stoker_ui::serve(listener, store, site, access, end).await;
    Ok(())
}

/// Serves the page of a cluster for all who sign in.
async fn serve_many(args: &UiArgs, by: SignInBy, output: Output) -> Result<(), Failure> {
    let mut signals = Signals::listen()?;
    let options = &args.source.cluster;
    let (offer, place) = shared::offer(&args.shared, by, options, args.allow_actions).await?;
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    let listener = match args.shared.listen {
        Some(address) => bind(address, "--listen ADDRESS:PORT").await?,
        None => bind(loopback, PORT_FLAG).await?,
    };
    announce(&format!("http://{}/", address(&listener)?), &place, output);
    let end = async move { signals.next().await };
    stoker_ui::serve_shared(listener, offer, end).await;
    Ok(())
}

fn announce(url: &str, place: &str, output: Output) {
    match output {
        Output::Json => print::out(json!({ "url": url, "place": place })),
        Output::Text => print::out(format!("{place} at\n  {url}\nCtrl-C ends the page")),
    }
}

fn start_local(
    root: Option<&str>,
    store: &Arc<Store>,
    allows_actions: bool,
) -> Result<Site, Failure> {
    let actions = local_actions::access(root.map(str::to_owned), allows_actions)?;
    let run_root = RunRoot::resolve(root, None)?;
    let searched = run_root.searched();
    if searched != run_root.root {
        print::err(format!("no runs yet in {searched}"));
    }
    let site = Site {
        place: format!("Runs in {}", run_root.root),
        is_cluster: false,
        arguments: root.map(|_| root_argument(&run_root)).unwrap_or_default(),
        actions: Some(Arc::new(actions)),
        ..Site::default()
    };
    let found = stored::start(run_root.clone(), store.clone());
    local::start(run_root, store.clone(), found);
    Ok(site)
}

/// Returns the argument for commands that act on the runs of a root, in any working directory.
fn root_argument(run_root: &RunRoot) -> String {
    format!("--root {}", quoted(&run_root.root))
}

/// Listens on the loopback interface. Other machines cannot reach the page. `flag` sets the port.
async fn listen(port: u16, flag: &str) -> Result<(TcpListener, Access), Failure> {
    let listener = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), flag).await?;
    let port = address(&listener)?.port();
    let access = Access {
        token: random_hex(TOKEN_BYTES)?,
        hosts: vec![format!("127.0.0.1:{port}"), format!("localhost:{port}")],
        cookie: format!("stoker-{port}"),
    };
    Ok((listener, access))
}

async fn bind(wanted: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    let first = match fallback(wanted) {
        Some(_) => TcpSocket::new_v6().and_then(|socket| listen_on_all(socket, wanted)),
        None => TcpListener::bind(wanted).await,
    };
    let is_missing = matches!(&first, Err(error) if lacks_ipv6(error));
    let bound = match fallback(wanted) {
        Some(ipv4) if is_missing => TcpListener::bind(ipv4).await,
        _ => first,
    };
    bound.map_err(|error| {
        Failure::System(format!("cannot listen on {wanted}: {error}; choose another port: {flag}"))
    })
}

/// Listens for IPv6 and IPv4, even if the kernel's setting `net.ipv6.bindv6only` is 1.
fn listen_on_all(socket: TcpSocket, any: SocketAddr) -> std::io::Result<TcpListener> {
    // Ignore the error: without the option, the socket follows the setting.
    let _ = sockopt::set_ipv6_v6only(&socket, false);
    // As in `TcpListener::bind`: a restarted page takes its port while old connections close.
    socket.set_reuseaddr(true)?;
    socket.bind(any)?;
    socket.listen(BACKLOG)
}

/// Returns the address to try if the kernel has no IPv6: `[::]` includes IPv4.
fn fallback(wanted: SocketAddr) -> Option<SocketAddr> {
    let is_any = wanted.is_ipv6() && wanted.ip().is_unspecified();
    is_any.then(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, wanted.port())))
}

/// Returns whether listening failed because IPv6 is unavailable. Another address must not hide
/// other errors, such as a port in use.
fn lacks_ipv6(error: &std::io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

fn address(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    let address = listener.local_addr();
    address
        .map_err(|error| Failure::System(format!("cannot read the address of the page: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_fall_back_to_ipv4() {
        let check = |wanted: &str, expected: Option<&str>| {
            let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
            assert_eq!(fallback(parse(wanted)), expected.map(parse));
        };
        check("[::]:8265", Some("0.0.0.0:8265"));
        check("[::1]:8265", None);
        check("0.0.0.0:8265", None);
        check("127.0.0.1:0", None);
        let is_missing = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL, Errno::ADDRINUSE, Errno::ACCESS]
            .map(|code| lacks_ipv6(&code.into()));
        assert_eq!(is_missing, [true, true, false, false]);
    }

    /// A new socket has the option on a machine whose setting `net.ipv6.bindv6only` is 1.
    #[tokio::test]
    async fn ipv6_only_sockets_accept_ipv4() {
        if TcpListener::bind("[::1]:0").await.is_err() {
            stoker_test_cluster::record_skip("needs IPv6");
            return;
        }
        let socket = TcpSocket::new_v6().unwrap();
        sockopt::set_ipv6_v6only(&socket, true).unwrap();
        let listener = listen_on_all(socket, "[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok());
    }

    #[test]
    fn root_of_copied_commands_is_quoted() {
        let run_root = RunRoot::resolve(Some("/data/my runs"), None).unwrap();
        assert_eq!(root_argument(&run_root), "--root '/data/my runs'");
    }
}
