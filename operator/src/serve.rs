//! A replica: watches, report server, leader election, metrics and health endpoints.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use kube::{Api, Client};
use rustix::io::Errno;
use rustix::net::sockopt;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::LABEL_COMPONENT;
use stoker_api::trial::Trial;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::cache::watch_into;
use crate::context::Context;
use crate::dispatch::dispatch;
use crate::leader;
use crate::metrics::Kind;
use crate::namespaces;
use crate::node::{CachedNode, observe_outage};
use crate::objects::{CachedPod, CachedTrial};
use crate::options::Options;
use crate::report_server::{ReportServer, tls};
use crate::tasks::{EndedTask, Tasks};
use crate::trial::config::OperatorConfig;
use crate::user_resources::{CachedExperiment, CachedJob};

/// Time for which the report server keeps serving after a stop request.
const REPORT_SERVER_STOP_DELAY: Duration = Duration::from_secs(3);
/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// Longest wait for the release of the lease on shutdown.
const RELEASE_MAX: Duration = Duration::from_secs(20);
/// Lifetime of a watch, enforced by the API server. The client gives up 5 s later, so a connection
/// that died silently is replaced within a minute.
const WATCH_SECONDS: u32 = 55;
/// Longest time without data on a connection to the API server while a response is due.
const READ_MAX: Duration = Duration::from_secs(62);

/// Serves until `stop` is set.
///
/// # Errors
///
/// An option is unusable (a file, a port, the API server's address), a background task ended, or
/// the namespaces that can be read have changed.
pub async fn serve(options: Options, mut stop: watch::Receiver<bool>) -> Result<(), String> {
    let operator_config = OperatorConfig::read(&options)?;
    let files = tls::Files { cert: options.tls_cert.clone(), key: options.tls_key.clone() };
    let tls_config = files.load()?;
    let client = client().await?;
    let report_listener = listen("--door-listen", &options.door_listen).await?;
    let observe_listener = listen("--observe-listen", &options.observe_listen).await?;
    let (context, changes) = Context::new(client, options, operator_config);
    context.experiment_queue.set_closed(true);
    context.trial_queue.set_closed(true);
    context.job_queue.set_closed(true);
    let mut tasks = Tasks::default();
    let report_server = ReportServer::new(context.clone());
    let router = report_server.clone().router();
    let report_server_stop = watch::Sender::new(false);
    let stopped = report_server_stop.subscribe();
    tasks.spawn("report server", tls::serve(report_listener, files, tls_config, router, stopped));
    let health_router = observe(context.clone());
    tasks.spawn("observe", async move {
        // `axum::serve` retries failed accepts itself, so this task ends only with the runtime.
        let _ = axum::serve(observe_listener, health_router).await;
    });
    let watched = context.options.namespaces();
    let spaces = namespaces::readable(&context.client, watched.clone()).await;
    watch_all(&context, &spaces, &mut tasks);
    tasks.spawn("dispatch", dispatch(context.clone(), changes));
    let events = context.clone();
    tasks.spawn("events", async move { events.write_events().await });
    let is_stopped = watch::Sender::new(false);
    let election = tokio::spawn(leader::run(context.clone(), is_stopped.subscribe()));
    let stop = async {
        tokio::select! {
            _ = stop.wait_for(|is_set| *is_set) => None,
            why = namespaces::changed(&context, watched, spaces) => Some(why),
        }
    };
    let result = supervise(&context, &mut tasks, election, stop, &is_stopped).await;
    let stop_delay = async {
        if result.is_ok() {
            // Trainers keep connecting here until all nodes know that this endpoint is terminating.
            tokio::time::sleep(REPORT_SERVER_STOP_DELAY).await;
        }
    };
    tokio::join!(stop_delay, report_server.write_delayed());
    report_server_stop.send_replace(true);
    tasks.shutdown().await;
    match result {
        Ok(None) => Ok(()),
        Ok(Some(why)) | Err(why) => Err(why),
    }
}

/// Waits for `stop`, which may return a reason to restart, or for a background task to end, which
/// is a failure. Then ends the election, which releases the lease, while all other tasks still run.
/// Returns the reason to restart.
///
/// # Errors
///
/// Describes the task that ended. The replica reports itself as failed from then on.
async fn supervise(
    context: &Context,
    tasks: &mut Tasks,
    mut election: JoinHandle<Result<(), EndedTask>>,
    stop: impl Future<Output = Option<String>>,
    is_stopped: &watch::Sender<bool>,
) -> Result<Option<String>, String> {
    let ended = tokio::select! {
        planned = stop => Ok(planned),
        ended = tasks.ended() => Err(ended.to_string()),
        ended = &mut election => {
            let ended = match ended {
                Ok(Err(worker)) => worker,
                Ok(Ok(())) => EndedTask { task: "election", panic: None },
                Err(error) => EndedTask::of_error("election", error),
            };
            Err(ended.to_string())
        }
    };
    match &ended {
        Ok(None) => {}
        Ok(Some(why)) => tracing::warn!(why, "this replica exits, to be restarted"),
        Err(why) => {
            tracing::error!(why, "background task ended; this replica exits");
            context.set_failed(why.clone());
        }
    }
    is_stopped.send_replace(true);
    if !election.is_finished() && tokio::time::timeout(RELEASE_MAX, &mut election).await.is_err() {
        tracing::warn!("lease not released in time; it must expire before another replica leads");
        election.abort();
    }
    ended
}

/// Listens on the address of this flag. `[::]` includes IPv4. It means IPv4 only if the kernel has
/// no IPv6.
async fn listen(flag: &str, address: &str) -> Result<TcpListener, String> {
    let is_any = |wanted: &SocketAddr| wanted.is_ipv6() && wanted.ip().is_unspecified();
    let bound = match address.parse::<SocketAddr>().ok().filter(is_any) {
        None => TcpListener::bind(address).await,
        Some(any) => match TcpSocket::new_v6().and_then(|socket| listen_on_all(socket, any)) {
            Err(error) if lacks_ipv6(&error) => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, any.port())).await
            }
            bound => bound,
        },
    };
    bound.map_err(|error| format!("{flag} {address}: {error}"))
}

/// Listens for IPv6 and IPv4, even if the kernel's setting `net.ipv6.bindv6only` is 1.
fn listen_on_all(socket: TcpSocket, any: SocketAddr) -> io::Result<TcpListener> {
    // Ignore the error: without the option, the socket follows the setting.
    let _ = sockopt::set_ipv6_v6only(&socket, false);
    // As in `TcpListener::bind`: a restarted replica takes its port while old connections close.
    socket.set_reuseaddr(true)?;
    socket.bind(any)?;
    socket.listen(BACKLOG)
}

/// Returns whether listening failed because IPv6 is unavailable. Another address must not hide
/// other errors, such as a port in use.
fn lacks_ipv6(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

async fn client() -> Result<Client, String> {
    let failed = |error| format!("cannot find the cluster configuration: {error}");
    let mut config = kube::Config::infer().await.map_err(failed)?;
    // The client must not retry: a repeated write could overtake a newer one. The callers retry.
    config.default_retry = false;
    // This is the only timeout of list requests. Each request restarts it, and watches end sooner.
    config.read_timeout = Some(READ_MAX);
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(|error| format!("cannot create the API client: {error}"))
}

fn watch_all(context: &Arc<Context>, spaces: &[Option<String>], tasks: &mut Tasks) {
    let client = || context.client.clone();
    fn apis<K>(spaces: &[Option<String>], client: &Client) -> Vec<(Option<String>, Api<K>)>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        let api = |space: &Option<String>| match space {
            Some(space) => Api::namespaced(client.clone(), space),
            None => Api::all(client.clone()),
        };
        spaces.iter().map(|space| (space.clone(), api(space))).collect()
    }
    let all = || watcher::Config::default().timeout(WATCH_SECONDS);
    let refresh = || context.refresh.subscribe();
    let experiments = watch_into(
        apis::<DeserializeGuard<Experiment>>(spaces, &client()),
        all(),
        context.experiments.clone(),
        |object| Some(CachedExperiment::new(object)),
        refresh(),
    );
    tasks.spawn("watch of experiments", experiments);
    let trials = watch_into(
        apis::<DeserializeGuard<Trial>>(spaces, &client()),
        all(),
        context.trials.clone(),
        |object| Some(CachedTrial::read(object)),
        refresh(),
    );
    tasks.spawn("watch of trials", trials);
    let jobs = watch_into(
        apis::<DeserializeGuard<InferenceJob>>(spaces, &client()),
        all(),
        context.jobs.clone(),
        |object| Some(CachedJob::new(object)),
        refresh(),
    );
    tasks.spawn("watch of jobs", jobs);
    let pods = watch_into(
        apis::<Pod>(spaces, &client()),
        all().labels(LABEL_COMPONENT),
        context.pods.clone(),
        |object| Some(CachedPod::new(object)),
        refresh(),
    );
    tasks.spawn("watch of pods", pods);
    let nodes: Vec<(Option<String>, Api<Node>)> = vec![(None, Api::all(client()))];
    let read = |object| Some(CachedNode::new(object));
    tasks.spawn("watch of nodes", watch_into(nodes, all(), context.nodes.clone(), read, refresh()));
    let context = context.clone();
    // Afterwards, changes of nodes are observed. This task ends, unlike the others.
    tokio::spawn(async move {
        context.nodes.wait_listed(1).await;
        observe_outage(&context);
    });
}

/// Serves `/metrics`, `/healthz` (no background task has ended) and `/readyz` (caches are synced,
/// and the API server responds).
fn observe(context: Arc<Context>) -> Router {
    let metrics = {
        let context = context.clone();
        async move || {
            for (kind, len) in [
                ("experiments", context.experiments.len()),
                ("trials", context.trials.len()),
                ("jobs", context.jobs.len()),
                ("pods", context.pods.len()),
                ("nodes", context.nodes.len()),
            ] {
                context.metrics.cached.get_or_create(&Kind { kind }).set(len as i64);
            }
            // Leadership expires by time, so a stored flag may be stale.
            context.metrics.leader.set(i64::from(context.is_leader()));
            let queued = &context.metrics.queued;
            let (experiments, trials) = (context.experiment_queue.len(), context.trial_queue.len());
            queued.get_or_create(&Kind { kind: "experiments" }).set(experiments as i64);
            queued.get_or_create(&Kind { kind: "trials" }).set(trials as i64);
            queued.get_or_create(&Kind { kind: "jobs" }).set(context.job_queue.len() as i64);
            let content = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", content)], context.metrics.render())
        }
    };
    let healthy = {
        let context = context.clone();
        async move || match context.failure() {
            None => (StatusCode::OK, "ok".to_owned()),
            Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_owned()),
        }
    };
    let ready = async move || match (context.is_ready(), context.is_connected()) {
        (true, true) => (StatusCode::OK, "ready"),
        (true, false) => (StatusCode::SERVICE_UNAVAILABLE, "the API server does not respond"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "waiting for the API server's initial lists"),
    };
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;
    use crate::fixture;

    /// Shared state without an API server.
    fn context() -> Arc<Context> {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        fixture::context(Client::try_from(config).unwrap())
    }

    async fn health(url: &str) -> (u16, String) {
        let response = reqwest::get(url).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Runs `task`, which ends, and checks the health status and the error of the replica.
    async fn check(ends: &'static str, task: BoxFuture<'static, ()>, expected: &str) {
        let context = context();
        let mut tasks = Tasks::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/healthz", listener.local_addr().unwrap());
        let router = observe(context.clone());
        tasks.spawn("observe", async { axum::serve(listener, router).await.unwrap() });
        assert_eq!(health(&url).await, (200, "ok".to_owned()));
        let is_stopped = watch::Sender::new(false);
        // The election must not end before the test has requested the health status.
        let (checked, was_checked) = oneshot::channel();
        let mut stop = is_stopped.subscribe();
        let election = tokio::spawn(async move {
            let _ = stop.wait_for(|is_set| *is_set).await;
            let _ = was_checked.await;
            Ok(())
        });
        tasks.spawn(ends, task);
        let never = std::future::pending();
        let mut stop = is_stopped.subscribe();
        let check = async {
            let _ = stop.wait_for(|is_set| *is_set).await;
            let response = health(&url).await;
            let _ = checked.send(());
            response
        };
        let serving = supervise(&context, &mut tasks, election, never, &is_stopped);
        let (result, response) = tokio::join!(serving, check);
        assert_eq!(result, Err(expected.to_owned()));
        assert_eq!(response, (503, expected.to_owned()));
    }

    /// Probes connect to the pod's address, which is IPv6 only, IPv4 only or one of both.
    #[tokio::test]
    async fn default_addresses_accept_all_ip_versions() {
        let addresses =
            |options: &Options| [options.door_listen.clone(), options.observe_listen.clone()];
        for address in addresses(&context().options) {
            let (host, _) = address.rsplit_once(':').unwrap();
            let listener = listen("--door-listen", &format!("{host}:0")).await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let has_ipv6 = TcpListener::bind("[::1]:0").await.is_ok();
            for loopback in ["127.0.0.1", "[::1]"].iter().take(if has_ipv6 { 2 } else { 1 }) {
                let connected = TcpStream::connect(format!("{loopback}:{port}")).await;
                assert!(connected.is_ok(), "{address} by {loopback}: {connected:?}");
            }
            let taken = listen("--door-listen", &format!("{host}:{port}")).await.unwrap_err();
            assert!(taken.starts_with(&format!("--door-listen {host}:{port}: ")), "{taken}");
        }
    }

    /// A new socket has the option on a node whose setting `net.ipv6.bindv6only` is 1.
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
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_ok());
    }

    /// With IPv4 alone, clients that use IPv6 would reach the other process.
    #[tokio::test]
    async fn port_in_use_on_ipv6_is_refused() {
        let Ok(other) = TcpListener::bind("[::1]:0").await else {
            stoker_test_cluster::record_skip("needs IPv6");
            return;
        };
        let address = format!("[::]:{}", other.local_addr().unwrap().port());
        let refused = listen("--door-listen", &address).await.unwrap_err();
        assert!(refused.starts_with(&format!("--door-listen {address}: ")), "{refused}");
    }

    #[test]
    fn ipv4_replaces_only_missing_ipv6() {
        let is_missing = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL, Errno::ADDRINUSE, Errno::ACCESS]
            .map(|code| lacks_ipv6(&code.into()));
        assert_eq!(is_missing, [true, true, false, false]);
    }

    #[tokio::test]
    async fn ended_task_fails_the_replica() {
        let panics = async { panic!("no events") };
        check("watch of pods", Box::pin(panics), "task \"watch of pods\" panicked: no events")
            .await;
        let expected = "task \"dispatch\" ended unexpectedly";
        check("dispatch", Box::pin(async {}), expected).await;
    }
}
