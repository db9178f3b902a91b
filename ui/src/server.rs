//! Routes of the page.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use serde_json::Value;
use tokio::net::TcpListener;

use crate::build::experiments::ListQuery;
use crate::build::table::TableQuery;
use crate::build::{compare, experiment, experiments, order, rungs, trial};
use crate::curves::{self, CurvesQuery};
use crate::logs::{self, LogsQuery};
use crate::respond::{
    csv, csv_of, curves_csv, data_or_error, html, json, message, objects, series_csv,
};
use crate::rows::MetricsCache;
use crate::security::{self, Access};
use crate::site::Site;
use crate::store::{Run, Store};
use crate::views::TrialTab;
use crate::{action_routes, assets, data, files, job_routes, live};

/// State that all requests share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: Arc<Store>,
    pub(crate) site: Site,
    pub(crate) metrics: MetricsCache,
}

pub(crate) type App = State<Arc<Shared>>;

/// Serves the page until `end` completes.
///
/// # Errors
///
/// The listener failed.
pub async fn serve(
    listener: TcpListener,
    store: Arc<Store>,
    site: Site,
    access: Access,
    end: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = router(Arc::new(Shared { store, site, metrics: MetricsCache::default() }));
    let router = router.layer(middleware::from_fn_with_state(access, security::guard));
    // Streams of live updates never end by themselves: do not wait for them.
    tokio::select! {
        served = axum::serve(listener, router) => served,
        () = end => Ok(()),
    }
}

fn router(shared: Arc<Shared>) -> Router {
    const EXPERIMENT: &str = "/experiments/{namespace}/{name}";
    let of = |path: &str| format!("{EXPERIMENT}{path}");
    Router::new()
        .route("/", get(|| async { Redirect::to("/experiments") }))
        .route("/go", get(go))
        .route("/experiments", get(list))
        .route("/experiments.json", get(list_json))
        .route("/experiments.csv", get(list_csv))
        .route("/compare", get(compare_page))
        .route("/compare.json", get(compare_json))
        .route("/compare.csv", get(compare_csv))
        .route("/jobs", get(job_routes::list))
        .route("/jobs.json", get(job_routes::list_json))
        .route("/jobs.csv", get(job_routes::list_csv))
        .route("/jobs/{namespace}/{name}", get(job_routes::page))
        .route("/jobs/{namespace}/{name}/manifest.json", get(job_routes::manifest))
        .route("/cluster", get(action_routes::slots))
        .route("/live", get(live_events))
        .route("/assets/{*path}", get(asset))
        .route(EXPERIMENT, get(overview))
        .route(&of("/{tab}"), get(experiment_tab))
        .route(&of("/actions/{action}"), get(action_routes::ask).post(action_routes::act))
        .route(&of("/trials/{index}"), get(trial_overview))
        .route(&of("/trials/{index}/{tab}"), get(trial_tab))
        .route(&of("/trials/{index}/checkpoints/{checkpoint}"), get(files::checkpoint))
        .route(&of("/trials/{index}/checkpoints/{checkpoint}/files/{*file}"), get(files::file))
        .fallback(|State(shared): App| async move {
            message(
                &shared.site,
                StatusCode::NOT_FOUND,
                "Page not found",
                "The URL is not one of Stoker's.",
            )
        })
        .with_state(shared)
}

/// Finds a run, or returns the page that says it is not there.
pub(crate) fn find(
    shared: &Shared,
    namespace: &str,
    name: &str,
) -> Result<Arc<Run>, Box<Response>> {
    shared.store.run(namespace, name).ok_or_else(|| {
        let text = format!("`{name}` is not an experiment of namespace `{namespace}`.");
        let status = StatusCode::NOT_FOUND;
        Box::new(message(&shared.site, status, "Experiment not found", &text))
    })
}

async fn list(State(shared): App, Query(query): Query<ListQuery>) -> Response {
    html(&experiments::page(&shared.site, &shared.store, &query))
}

async fn list_json(State(shared): App, Query(query): Query<ListQuery>) -> Response {
    json(&Value::Array(experiments::export(&shared.store, &query)))
}

async fn list_csv(State(shared): App, Query(query): Query<ListQuery>) -> Response {
    csv_of(&experiments::export(&shared.store, &query))
}

/// Goes to the experiment or the trial of a text such as `iris` or `iris-3`.
async fn go(State(shared): App, RawQuery(query): RawQuery) -> Response {
    let wanted = values(query.as_deref(), "q").into_iter().next().unwrap_or_default();
    let wanted = wanted.trim();
    let runs = shared.store.runs();
    let is_named = |name: &str| runs.iter().find(|run| run.id() == name || run.name == name);
    let target = is_named(wanted).map(|run| run.base()).or_else(|| {
        let (name, index) = wanted.rsplit_once(['-', '/', ' '])?;
        let index = index.parse().ok()?;
        let run = is_named(name).filter(|run| run.trials.contains_key(&index))?;
        Some(run.trial_base(index))
    });
    let target = target.unwrap_or_else(|| {
        format!("/experiments?filter={}", crate::text::query(&format!("\"{wanted}\"")))
    });
    Redirect::to(&target).into_response()
}

/// Returns all values of a name in a query.
pub(crate) fn values(query: Option<&str>, name: &str) -> Vec<String> {
    url::form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .filter(|(of, _)| of == name)
        .map(|(_, value)| value.into_owned())
        .collect()
}

/// Returns the runs that a query names as `e=NS/ID`.
fn compared(shared: &Shared, query: Option<&str>) -> Vec<Arc<Run>> {
    let run = |name: String| {
        let (namespace, id) = name.split_once('/')?;
        shared.store.run(namespace, id)
    };
    values(query, "e").into_iter().filter_map(run).take(compare::COMPARED_MAX).collect()
}

async fn compare_page(State(shared): App, RawQuery(query): RawQuery) -> Response {
    let runs = compared(&shared, query.as_deref());
    if runs.is_empty() {
        let text = "Select experiments in the list, then press Compare.";
        return message(&shared.site, StatusCode::OK, "Nothing to compare", text);
    }
    let show_all = !values(query.as_deref(), "all").is_empty();
    html(&compare::experiments(&shared.site, &runs, show_all))
}

async fn compare_json(State(shared): App, RawQuery(query): RawQuery) -> Response {
    json(&compare::data(&compared(&shared, query.as_deref())))
}

async fn compare_csv(State(shared): App, RawQuery(query): RawQuery) -> Response {
    let (header, rows) = compare::csv(&compared(&shared, query.as_deref()));
    csv(&header, &rows)
}

async fn live_events(State(shared): App, RawQuery(query): RawQuery) -> Response {
    let of = |name: &str| {
        let value = values(query.as_deref(), name).into_iter().next()?;
        let (namespace, id) = value.split_once('/')?;
        Some((namespace.to_owned(), id.to_owned()))
    };
    let shown = match (of("e"), of("j")) {
        (Some((namespace, id)), _) => live::Shown::Run(namespace, id),
        (None, Some((namespace, id))) => live::Shown::Job(namespace, id),
        (None, None) => live::Shown::All,
    };
    live::events(shared.store.clone(), shown).into_response()
}

async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Response {
    assets::serve(&path, &headers)
}

/// Asks what the viewer may do, before a page with buttons.
async fn ask_permissions(shared: &Shared, namespace: &str) {
    if let Some(cluster) = &shared.site.cluster {
        cluster.ask(namespace).await;
    }
}

async fn overview(
    State(shared): App,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<TableQuery>,
) -> Response {
    ask_permissions(&shared, &namespace).await;
    match find(&shared, &namespace, &name) {
        Ok(run) => html(&experiment::overview(&shared.site, &run, &query)),
        Err(response) => *response,
    }
}

async fn experiment_tab(
    State(shared): App,
    Path((namespace, name, tab)): Path<(String, String, String)>,
    Query(query): Query<TableQuery>,
    RawQuery(raw): RawQuery,
) -> Response {
    let run = match find(&shared, &namespace, &name) {
        Ok(run) => run,
        Err(response) => return *response,
    };
    if !tab.contains('.') {
        ask_permissions(&shared, &namespace).await;
    }
    let (site, raw) = (&shared.site, raw.as_deref());
    let number = |name: &str| values(raw, name).first().and_then(|text| text.parse().ok());
    match tab.as_str() {
        "trials" => html(&experiment::trials(site, &run, &query)),
        "rungs" => html(&rungs::page(site, &run, number("bracket"))),
        "hyperparameters" => html(&experiment::hyperparameters(site, &run)),
        "checkpoints" => html(&experiment::checkpoints(site, &run)),
        "configuration" => html(&experiment::configuration(site, &run)),
        "events" => html(&experiment::events(site, &run)),
        "logs" => html(&experiment::logs(site, &run, number("trial"))),
        "compare" => {
            let list = values(raw, "t").join(",");
            let show_all = !values(raw, "all").is_empty();
            html(&compare::trials(site, &run, &curves::indexes(Some(&list)), show_all))
        }
        "data.json" => json(&data::data(&run)),
        "curves.json" => match Query::<CurvesQuery>::try_from_uri(&uri(raw)) {
            Ok(Query(query)) => {
                data_or_error(curves::of_experiment(&run, &shared.metrics, &query).await)
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "curves.csv" => match Query::<CurvesQuery>::try_from_uri(&uri(raw)) {
            Ok(Query(query)) => match curves::of_experiment(&run, &shared.metrics, &query).await {
                Ok(data) => curves_csv(&data),
                Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
            },
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "trials.csv" | "data.csv" => {
            let (header, rows) = order::export(&run, &query);
            csv(&header, &rows)
        }
        "trials.json" => {
            let (header, rows) = order::export(&run, &query);
            json(&objects(&header, rows))
        }
        _ => {
            let text = format!("`{tab}` is not a page of an experiment.");
            message(site, StatusCode::NOT_FOUND, "Page not found", &text)
        }
    }
}

/// Returns a URI with a query, to parse it again as another type.
fn uri(query: Option<&str>) -> axum::http::Uri {
    format!("/?{}", query.unwrap_or_default()).parse().unwrap_or_default()
}

async fn trial_overview(
    State(shared): App,
    Path((namespace, name, index)): Path<(String, String, u32)>,
    Query(query): Query<TableQuery>,
) -> Response {
    trial_page(
        &shared,
        (&namespace, &name, index),
        TrialTab::Overview,
        &query,
        &LogsQuery::default(),
    )
}

fn trial_page(
    shared: &Shared,
    (namespace, name, index): (&str, &str, u32),
    tab: TrialTab,
    query: &TableQuery,
    logs: &LogsQuery,
) -> Response {
    let run = match find(shared, namespace, name) {
        Ok(run) => run,
        Err(response) => return *response,
    };
    match trial::page(&shared.site, &run, index, tab, query, logs) {
        Some(page) => html(&page),
        None => {
            let num = run.trials.len();
            let text = format!("`{name}` has no trial {index}; it has {num}.");
            message(&shared.site, StatusCode::NOT_FOUND, "Trial not found", &text)
        }
    }
}

async fn trial_tab(
    State(shared): App,
    Path((namespace, name, index, tab)): Path<(String, String, u32, String)>,
    Query(query): Query<TableQuery>,
    Query(logs_query): Query<LogsQuery>,
    RawQuery(raw): RawQuery,
) -> Response {
    let page = |tab| trial_page(&shared, (&namespace, &name, index), tab, &query, &logs_query);
    match tab.as_str() {
        "metrics" => return page(TrialTab::Metrics),
        "attempts" => return page(TrialTab::Attempts),
        "logs" => return page(TrialTab::Logs),
        "checkpoints" => return page(TrialTab::Checkpoints),
        "profiler" => return page(TrialTab::Profiler),
        "configuration" => return page(TrialTab::Configuration),
        _ => {}
    }
    let run = match find(&shared, &namespace, &name) {
        Ok(run) => run,
        Err(response) => return *response,
    };
    match tab.as_str() {
        "curves.json" => match Query::<CurvesQuery>::try_from_uri(&uri(raw.as_deref())) {
            Ok(Query(query)) => {
                data_or_error(curves::of_trial(&run, &shared.metrics, index, &query).await)
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "curves.csv" => match Query::<CurvesQuery>::try_from_uri(&uri(raw.as_deref())) {
            Ok(Query(query)) => {
                match curves::of_trial(&run, &shared.metrics, index, &query).await {
                    Ok(data) => series_csv(&data, "metric"),
                    Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
                }
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "profiler.json" => data_or_error(curves::profiler(&run, index).await),
        "profiler.csv" => match curves::profiler(&run, index).await {
            Ok(data) => series_csv(&data, "title"),
            Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
        },
        "logs.json" => data_or_error(logs::logs(&run, index, &logs_query).await),
        "logs.txt" => {
            let attempt = logs::attempt(&run, index, &logs_query).unwrap_or(0);
            match logs::text(&run, index, attempt).await {
                Ok(text) => {
                    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
                    (kind, Body::from(text)).into_response()
                }
                Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
            }
        }
        _ => {
            let text = format!("`{tab}` is not a page of a trial.");
            message(&shared.site, StatusCode::NOT_FOUND, "Page not found", &text)
        }
    }
}
