//! Routes of the page, and who may reach them.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Redirect;
use axum::routing::{MethodRouter, get, post};
use axum::{Router, middleware};
use tokio::net::TcpListener;

use crate::security::{self, Access, Gate};
use crate::sessions::{Offer, Sessions};
use crate::site::Site;
use crate::store::Store;
use crate::viewer::Viewer;
use crate::visible::Visible;
use crate::{action_routes, bulk_routes, connections, files, job_routes, server, sign_in};

/// Time between two checks for sessions that are over.
const SWEEP: Duration = Duration::from_secs(15);
const ASSETS: &str = "/assets/{*path}";

/// Serves the page of one viewer until `end` completes.
pub async fn serve(
    listener: TcpListener,
    store: Arc<Store>,
    site: Site,
    access: Access,
    end: impl Future<Output = ()> + Send + 'static,
) {
    let (visible, metrics) = (Visible::all(store), Arc::default());
    let viewer = Viewer { visible, site, metrics, session: None };
    serve_gate(listener, Gate::Private(access, Arc::new(viewer)), end).await;
}

/// Serves the page of all viewers who sign in, until `end` completes.
pub async fn serve_shared(
    listener: TcpListener,
    offer: Offer,
    end: impl Future<Output = ()> + Send + 'static,
) {
    let sessions = Arc::new(Sessions::new(offer));
    let swept = sessions.clone();
    let sweep = async move {
        loop {
            tokio::time::sleep(SWEEP).await;
            swept.sweep();
        }
    };
    tokio::select! {
        () = serve_gate(listener, Gate::Shared(sessions, Arc::default()), end) => {}
        () = sweep => {}
    }
}

async fn serve_gate(
    listener: TcpListener,
    gate: Gate,
    end: impl Future<Output = ()> + Send + 'static,
) {
    let limits = connections::LIMITS.within_open_files();
    // Streams of live updates never end by themselves: do not wait for them.
    tokio::select! {
        never = connections::serve(listener, router(gate), limits) => match never {},
        () = end => {}
    }
}

/// Returns all routes with records. The router admits only requests of a viewer to them.
pub(crate) fn routes() -> Vec<(String, MethodRouter)> {
    const EXPERIMENT: &str = "/experiments/{namespace}/{name}";
    let of = |path: &str| format!("{EXPERIMENT}{path}");
    let fixed = |path: &str, route: MethodRouter| (path.to_owned(), route);
    vec![
        fixed("/", get(|| async { Redirect::to("/experiments") })),
        fixed("/go", get(server::go)),
        fixed("/experiments", get(server::list)),
        fixed("/experiments.json", get(server::list_json)),
        fixed("/experiments.csv", get(server::list_csv)),
        fixed("/compare", get(server::compare_page)),
        fixed("/compare.json", get(server::compare_json)),
        fixed("/compare.csv", get(server::compare_csv)),
        fixed("/jobs", get(job_routes::list)),
        fixed("/jobs.json", get(job_routes::list_json)),
        fixed("/jobs.csv", get(job_routes::list_csv)),
        fixed("/jobs/{namespace}/{name}", get(job_routes::page)),
        fixed("/jobs/{namespace}/{name}/manifest.json", get(job_routes::manifest)),
        fixed("/actions/{action}", get(bulk_routes::ask).post(bulk_routes::act)),
        fixed("/cluster", get(action_routes::slots)),
        fixed("/live", get(server::live_events)),
        fixed("/namespaces", get(sign_in::namespaces).post(sign_in::add_namespace)),
        fixed("/sign-out", post(sign_in::sign_out)),
        fixed(EXPERIMENT, get(server::overview)),
        (of("/{tab}"), get(server::experiment_tab)),
        (of("/actions/{action}"), get(action_routes::ask).post(action_routes::act)),
        (of("/trials/{index}"), get(server::trial_overview)),
        (of("/trials/{index}/{tab}"), get(server::trial_tab)),
        (of("/trials/{index}/checkpoints/{checkpoint}"), get(files::checkpoint)),
        (of("/trials/{index}/checkpoints/{checkpoint}/files/{*file}"), get(files::file)),
    ]
}

pub(crate) fn router(gate: Gate) -> Router {
    let gate = Arc::new(gate);
    let pages =
        routes().into_iter().fold(Router::new(), |all, (path, route)| all.route(&path, route));
    let pages = pages.fallback(server::not_found);
    let admit = middleware::from_fn_with_state(gate.clone(), security::admit);
    let assets = get(server::asset);
    let router = match &*gate {
        Gate::Private(..) => pages.route(ASSETS, assets).layer(admit),
        Gate::Shared(sessions, _) => {
            sign_in::routes(sessions.clone()).route(ASSETS, assets).merge(pages.layer(admit))
        }
    };
    router.layer(middleware::from_fn_with_state(gate, security::guard))
}
