//! A replica: watches, report server, leader election, metrics and health endpoints.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use kube::{Api, Client};
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::names::LABEL_COMPONENT;
use stoker_api::trial::Trial;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::cache::feed;
use crate::declared::{CachedExperiment, CachedJob};
use crate::door::{Door, tls};
use crate::leader;
use crate::metrics::Kind;
use crate::objects::{CachedNode, CachedPod, CachedTrial};
use crate::options::Options;
use crate::tasks::{Ended, Tasks};
use crate::trial::config::Setup;
use crate::world::{World, dispatch};

/// Time for which the report server keeps serving after a stop request.
const DOOR_LINGERS: Duration = Duration::from_secs(3);
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
/// An option is unusable (a file, a port, the API server's address), or a background task ended.
pub async fn serve(options: Options, stop: watch::Receiver<bool>) -> Result<(), String> {
    let setup = Setup::read(&options)?;
    let files = tls::Files { cert: options.tls_cert.clone(), key: options.tls_key.clone() };
    let tls_config = files.load()?;
    let client = client().await?;
    let listen = async |flag: &str, address: &str| {
        let failed = |error| format!("{flag} {address}: {error}");
        TcpListener::bind(address).await.map_err(failed)
    };
    let door_listener = listen("--door-listen", &options.door_listen).await?;
    let observe_listener = listen("--observe-listen", &options.observe_listen).await?;
    let (world, changes) = World::new(client, options, setup);
    world.experiment_queue.set_closed(true);
    world.trial_queue.set_closed(true);
    world.job_queue.set_closed(true);
    let mut tasks = Tasks::default();
    watch_all(&world, &mut tasks);
    tasks.spawn("dispatch", dispatch(world.clone(), changes));
    let router = Door::new(world.clone()).router();
    let door_stop = watch::Sender::new(false);
    let stopped = door_stop.subscribe();
    tasks.spawn("door", tls::serve(door_listener, files, tls_config, router, stopped));
    let observed = observe(world.clone());
    tasks.spawn("observe", async move {
        // `axum::serve` retries failed accepts itself, so this task ends only with the runtime.
        let _ = axum::serve(observe_listener, observed).await;
    });
    let is_stopped = watch::Sender::new(false);
    let election = tokio::spawn(leader::run(world.clone(), is_stopped.subscribe()));
    let result = supervise(&world, &mut tasks, election, stop, &is_stopped).await;
    if result.is_ok() {
        // Trainers keep connecting here until all nodes know that this endpoint is terminating.
        tokio::time::sleep(DOOR_LINGERS).await;
    }
    door_stop.send_replace(true);
    tasks.shutdown().await;
    result
}

/// Waits for `stop` or for a background task to end, which is a failure. Then ends the election,
/// which releases the lease, while all other tasks still run.
///
/// # Errors
///
/// Describes the task that ended. The replica reports itself as failed from then on.
async fn supervise(
    world: &World,
    tasks: &mut Tasks,
    mut election: JoinHandle<Result<(), Ended>>,
    mut stop: watch::Receiver<bool>,
    is_stopped: &watch::Sender<bool>,
) -> Result<(), String> {
    let ended = tokio::select! {
        _ = stop.wait_for(|is_set| *is_set) => None,
        ended = tasks.ended() => Some(ended),
        ended = &mut election => Some(match ended {
            Ok(Err(worker)) => worker,
            Ok(Ok(())) => Ended { task: "election", panic: None },
            Err(error) => Ended::of_error("election", error),
        }),
    };
    let why = ended.map(|ended| ended.to_string());
    if let Some(why) = &why {
        tracing::error!(why, "background task ended; this replica exits");
        world.set_failed(why.clone());
    }
    is_stopped.send_replace(true);
    if !election.is_finished() && tokio::time::timeout(RELEASE_MAX, &mut election).await.is_err() {
        tracing::warn!("lease not released in time; it must expire before another replica leads");
        election.abort();
    }
    why.map_or(Ok(()), Err)
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

fn watch_all(world: &Arc<World>, tasks: &mut Tasks) {
    let client = || world.client.clone();
    let spaces = world.options.namespaces();
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
    let refresh = || world.refresh.subscribe();
    let experiments = feed(
        apis::<DeserializeGuard<Experiment>>(&spaces, &client()),
        all(),
        world.experiments.clone(),
        |object| Some(CachedExperiment::new(object)),
        refresh(),
    );
    tasks.spawn("watch of experiments", experiments);
    let trials = feed(
        apis::<DeserializeGuard<Trial>>(&spaces, &client()),
        all(),
        world.trials.clone(),
        |object| Some(CachedTrial::read(object)),
        refresh(),
    );
    tasks.spawn("watch of trials", trials);
    let jobs = feed(
        apis::<DeserializeGuard<InferenceJob>>(&spaces, &client()),
        all(),
        world.jobs.clone(),
        |object| Some(CachedJob::new(object)),
        refresh(),
    );
    tasks.spawn("watch of jobs", jobs);
    let pods = feed(
        apis::<Pod>(&spaces, &client()),
        all().labels(LABEL_COMPONENT),
        world.pods.clone(),
        |object| Some(CachedPod::new(object)),
        refresh(),
    );
    tasks.spawn("watch of pods", pods);
    let nodes: Vec<(Option<String>, Api<Node>)> = vec![(None, Api::all(client()))];
    let read = |object| Some(CachedNode::new(object));
    tasks.spawn("watch of nodes", feed(nodes, all(), world.nodes.clone(), read, refresh()));
}

/// Serves `/metrics`, `/healthz` (no background task has ended) and `/readyz` (caches are synced,
/// and the API server responds).
fn observe(world: Arc<World>) -> Router {
    let metrics = {
        let world = world.clone();
        async move || {
            for (kind, len) in [
                ("experiments", world.experiments.len()),
                ("trials", world.trials.len()),
                ("jobs", world.jobs.len()),
                ("pods", world.pods.len()),
                ("nodes", world.nodes.len()),
            ] {
                world.metrics.cached.get_or_create(&Kind { kind }).set(len as i64);
            }
            // Leadership expires by time, so a stored flag may be stale.
            world.metrics.leader.set(i64::from(world.is_leader()));
            let queued = &world.metrics.queued;
            let (experiments, trials) = (world.experiment_queue.len(), world.trial_queue.len());
            queued.get_or_create(&Kind { kind: "experiments" }).set(experiments as i64);
            queued.get_or_create(&Kind { kind: "trials" }).set(trials as i64);
            queued.get_or_create(&Kind { kind: "jobs" }).set(world.job_queue.len() as i64);
            let content = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([("content-type", content)], world.metrics.render())
        }
    };
    let healthy = {
        let world = world.clone();
        async move || match world.failure() {
            None => (StatusCode::OK, "ok".to_owned()),
            Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_owned()),
        }
    };
    let ready = async move || match (world.is_ready(), world.is_connected()) {
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
    use clap::Parser as _;
    use futures::future::BoxFuture;
    use tokio::sync::oneshot;

    use super::*;
    use crate::options::{Arguments, Command};

    /// Shared state without an API server.
    fn world() -> Arc<World> {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, [7; 32]).unwrap();
        let key = key.to_str().unwrap();
        let required = ["--identity", "a", "--door-url", "https://door", "--trainer-image", "i"];
        let files = ["--tls-ca", key, "--gang-key-file", key];
        let arguments = [&["stoker-operator", "run"][..], &required, &files].concat();
        let Command::Run(options) = Arguments::parse_from(arguments).command;
        let setup = Setup::read(&options).unwrap_or_else(|error| panic!("{error}"));
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        World::new(Client::try_from(config).unwrap(), *options, setup).0
    }

    async fn health(url: &str) -> (u16, String) {
        let response = reqwest::get(url).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Runs `task`, which ends, and checks the health status and the error of the replica.
    async fn check(ends: &'static str, task: BoxFuture<'static, ()>, expected: &str) {
        let world = world();
        let mut tasks = Tasks::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/healthz", listener.local_addr().unwrap());
        let router = observe(world.clone());
        tasks.spawn("observe", async { axum::serve(listener, router).await.unwrap() });
        assert_eq!(health(&url).await, (200, "ok".to_owned()));
        let (never, is_stopped) = (watch::Sender::new(false), watch::Sender::new(false));
        // The election must not end before the test has requested the health status.
        let (checked, was_checked) = oneshot::channel();
        let mut stop = is_stopped.subscribe();
        let election = tokio::spawn(async move {
            let _ = stop.wait_for(|is_set| *is_set).await;
            let _ = was_checked.await;
            Ok(())
        });
        tasks.spawn(ends, task);
        let mut stop = is_stopped.subscribe();
        let check = async {
            let _ = stop.wait_for(|is_set| *is_set).await;
            let response = health(&url).await;
            let _ = checked.send(());
            response
        };
        let serving = supervise(&world, &mut tasks, election, never.subscribe(), &is_stopped);
        let (result, response) = tokio::join!(serving, check);
        assert_eq!(result, Err(expected.to_owned()));
        assert_eq!(response, (503, expected.to_owned()));
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
