//! A replica: its watches, its door, its part in the election, and what is told of them.

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
use tokio::task::JoinSet;

use crate::cache::feed;
use crate::declared::{CachedExperiment, CachedJob};
use crate::door::{Door, tls};
use crate::leader;
use crate::metrics::Kind;
use crate::objects::{CachedNode, CachedPod, CachedTrial};
use crate::options::Options;
use crate::trial::config::Setup;
use crate::world::{World, dispatch};

/// How long the door is served after the operator was told to end.
const DOOR_LINGERS: Duration = Duration::from_secs(3);

/// Serves until `stop` says so.
///
/// # Errors
///
/// What it was started with does not work: a file, a port, the API server's address.
pub async fn serve(options: Options, mut stop: watch::Receiver<bool>) -> Result<(), String> {
    let setup = Setup::read(&options)?;
    let files = tls::Files { cert: options.tls_cert.clone(), key: options.tls_key.clone() };
    let tls_config = files.load()?;
    let client = client().await?;
    let listen = async |flag: &str, address: &str| {
        let failed = |it| format!("{flag} {address}: {it}");
        TcpListener::bind(address).await.map_err(failed)
    };
    let door_listener = listen("--door-listen", &options.door_listen).await?;
    let observe_listener = listen("--observe-listen", &options.observe_listen).await?;
    let (world, changes) = World::new(client, options, setup);
    world.experiment_queue.set_closed(true);
    world.trial_queue.set_closed(true);
    world.job_queue.set_closed(true);
    let mut tasks = JoinSet::new();
    watch_all(&world, &mut tasks);
    tasks.spawn(dispatch(world.clone(), changes));
    let router = Door::new(world.clone()).router();
    let door_stop = watch::Sender::new(false);
    let stopped = door_stop.subscribe();
    tasks.spawn(tls::serve(door_listener, files, tls_config, router, stopped));
    let observed = observe(world.clone());
    tasks.spawn(async move {
        // Accepting is tried again inside, so this ends only with the runtime.
        let _ = axum::serve(observe_listener, observed).await;
    });
    let election = tokio::spawn(leader::run(world, stop.clone()));
    let _ = stop.wait_for(|it| *it).await;
    // The lease is given back before anything else ends.
    let _ = election.await;
    // Trainers are sent here until everybody has heard that this replica is on its way.
    tokio::time::sleep(DOOR_LINGERS).await;
    door_stop.send_replace(true);
    tasks.shutdown().await;
    Ok(())
}

async fn client() -> Result<Client, String> {
    let mut config = kube::Config::infer().await.map_err(|it| format!("no cluster: {it}"))?;
    // Retries are ours: a write that was repeated behind our back may come after a newer one.
    config.default_retry = false;
    Client::try_from(config).map_err(|it| format!("no client: {it}"))
}

fn watch_all(world: &Arc<World>, tasks: &mut JoinSet<()>) {
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
        spaces.iter().map(|it| (it.clone(), api(it))).collect()
    }
    let all = watcher::Config::default;
    let refresh = || world.refresh.subscribe();
    tasks.spawn(feed(
        apis::<DeserializeGuard<Experiment>>(&spaces, &client()),
        all(),
        world.experiments.clone(),
        |it| Some(CachedExperiment::new(it)),
        refresh(),
    ));
    tasks.spawn(feed(
        apis::<DeserializeGuard<Trial>>(&spaces, &client()),
        all(),
        world.trials.clone(),
        |it| Some(CachedTrial::read(it)),
        refresh(),
    ));
    tasks.spawn(feed(
        apis::<DeserializeGuard<InferenceJob>>(&spaces, &client()),
        all(),
        world.jobs.clone(),
        |it| Some(CachedJob::new(it)),
        refresh(),
    ));
    tasks.spawn(feed(
        apis::<Pod>(&spaces, &client()),
        all().labels(LABEL_COMPONENT),
        world.pods.clone(),
        |it| Some(CachedPod::new(it)),
        refresh(),
    ));
    let nodes: Vec<(Option<String>, Api<Node>)> = vec![(None, Api::all(client()))];
    let read = |it| Some(CachedNode::new(it));
    tasks.spawn(feed(nodes, all(), world.nodes.clone(), read, refresh()));
}

/// `/metrics`, `/healthz`: it runs; `/readyz`: it knows what the API server holds and
/// reaches it.
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
            // Who leads is a question of time: nobody may have looked since it was over.
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
    let ready = async move || match (world.is_ready(), world.is_connected()) {
        (true, true) => (StatusCode::OK, "ready"),
        (true, false) => (StatusCode::SERVICE_UNAVAILABLE, "the API server does not answer"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the API server's objects are not all read yet"),
    };
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
}
