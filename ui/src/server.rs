//! Pages of experiments and trials, and the list of experiments.

use std::sync::Arc;

use axum::extract::{Extension, Path, Query, RawQuery};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use serde_json::Value;

use crate::build::experiments::ListQuery;
use crate::build::table::TableQuery;
use crate::build::{compare, experiment, experiments, order, rungs, trial};
use crate::curves::{self, CurvesQuery};
use crate::live::Version;
use crate::logs::{self, LogsQuery};
use crate::respond::{
    csv, csv_of, curves_csv, data_or_error, download, html, json, large_json, message, objects,
    series_csv,
};
use crate::site::Site;
use crate::store::{Run, created};
use crate::viewer::Viewer;
use crate::views::TrialTab;
use crate::{assets, data, live};

/// Viewer of a request. A route without a viewer cannot be called.
pub(crate) type App = Extension<Arc<Viewer>>;

pub(crate) async fn not_found(Extension(viewer): App) -> Response {
    let text = "The URL is not one of Stoker's.";
    message(&viewer.site, StatusCode::NOT_FOUND, "Page not found", text)
}

/// Finds a run, or returns the page that says it is not there.
pub(crate) async fn find(
    viewer: &Viewer,
    namespace: &str,
    name: &str,
) -> Result<Arc<Run>, Box<Response>> {
    viewer.run(namespace, name).await.ok_or_else(|| {
        let text = format!("`{name}` is not an experiment of namespace `{namespace}`.");
        let why = viewer.visible.watch_error_in(namespace);
        missing(&viewer.site, "Experiment", text, why)
    })
}

/// Returns the page in place of a record that is not in the store. It may exist if there is a
/// reason why the records cannot be read.
pub(crate) fn missing(site: &Site, kind: &str, text: String, why: Option<String>) -> Box<Response> {
    let (status, title, text) = match why {
        Some(why) => {
            let title = format!("{kind}s cannot be read now");
            (StatusCode::SERVICE_UNAVAILABLE, title, crate::text::escape(&why))
        }
        None => (StatusCode::NOT_FOUND, format!("{kind} not found"), text),
    };
    Box::new(message(site, status, &title, &text))
}

pub(crate) async fn list(Extension(viewer): App, Query(query): Query<ListQuery>) -> Response {
    if viewer.sees_no_namespace() {
        return Redirect::to("/namespaces").into_response();
    }
    html(&experiments::page(&viewer.site, &viewer.visible, &query))
}

pub(crate) async fn list_json(Extension(viewer): App, Query(query): Query<ListQuery>) -> Response {
    match experiments::export(&viewer.visible, &query) {
        Ok(rows) => json(&Value::Array(rows)),
        Err(error) => wrong_filter(error),
    }
}

pub(crate) async fn list_csv(Extension(viewer): App, Query(query): Query<ListQuery>) -> Response {
    match experiments::export(&viewer.visible, &query) {
        Ok(rows) => csv_of(&rows),
        Err(error) => wrong_filter(error),
    }
}

/// Returns the run with this ID, or the newest with this name.
fn named<'a>(runs: &'a [Arc<Run>], name: &str) -> Option<&'a Arc<Run>> {
    let of_name = || runs.iter().filter(|run| run.name == name);
    let newest = || of_name().max_by_key(|run| (run.is_running, created(run)));
    runs.iter().find(|run| run.id() == name).or_else(newest)
}

/// Goes to the experiment or the trial of a text such as `iris` or `iris-3`.
pub(crate) async fn go(Extension(viewer): App, RawQuery(query): RawQuery) -> Response {
    let wanted = values(query.as_deref(), "q").into_iter().next().unwrap_or_default();
    let wanted = wanted.trim();
    let runs = viewer.visible.runs();
    let target = named(&runs, wanted).map(|run| run.base()).or_else(|| {
        let (name, index) = wanted.rsplit_once(['-', '/', ' '])?;
        let index = index.parse().ok()?;
        let run = named(&runs, name).filter(|run| run.trials.contains_key(&index))?;
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
fn compared(viewer: &Viewer, query: Option<&str>) -> Vec<Arc<Run>> {
    let run = |name: String| {
        let (namespace, id) = name.split_once('/')?;
        viewer.visible.run(namespace, id)
    };
    values(query, "e").into_iter().filter_map(run).take(compare::COMPARED_MAX).collect()
}

pub(crate) async fn compare_page(Extension(viewer): App, RawQuery(query): RawQuery) -> Response {
    // Read first: a later change then only loads the page again.
    let version = viewer.visible.version();
    let runs = compared(&viewer, query.as_deref());
    if runs.is_empty() {
        let text = "Select experiments in the list, then press Compare.";
        return message(&viewer.site, StatusCode::OK, "Nothing to compare", text);
    }
    let show_all = !values(query.as_deref(), "all").is_empty();
    html(&compare::experiments(&viewer.site, &runs, version, show_all))
}

pub(crate) async fn compare_json(Extension(viewer): App, RawQuery(query): RawQuery) -> Response {
    json(&compare::data(&compared(&viewer, query.as_deref())))
}

pub(crate) async fn compare_csv(Extension(viewer): App, RawQuery(query): RawQuery) -> Response {
    let (header, rows) = compare::csv(&compared(&viewer, query.as_deref()));
    csv(&header, &rows)
}

pub(crate) async fn live_events(
    Extension(viewer): App,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
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
    // A browser that reconnects sends the last version that it received.
    let received = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let received = received.and_then(Version::parse);
    let of_page = || Version::parse(values(query.as_deref(), "v").first()?);
    live::events(viewer, shown, received.or_else(of_page)).into_response()
}

pub(crate) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Response {
    assets::serve(&path, &headers)
}

/// Asks what the viewer may do, before a page with buttons.
async fn ask_permissions(viewer: &Viewer, namespace: &str) {
    if let Some(actions) = &viewer.site.actions {
        actions.ask(namespace).await;
    }
}

pub(crate) async fn overview(
    Extension(viewer): App,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<TableQuery>,
) -> Response {
    let run = match find(&viewer, &namespace, &name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    ask_permissions(&viewer, &namespace).await;
    html(&experiment::overview(&viewer.site, &run, &query))
}

pub(crate) async fn experiment_tab(
    Extension(viewer): App,
    Path((namespace, name, tab)): Path<(String, String, String)>,
    Query(query): Query<TableQuery>,
    RawQuery(raw): RawQuery,
) -> Response {
    let run = match find(&viewer, &namespace, &name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    if !tab.contains('.') {
        ask_permissions(&viewer, &namespace).await;
    }
    let (site, raw) = (&viewer.site, raw.as_deref());
    let number = |name: &str| values(raw, name).first().and_then(|text| text.parse().ok());
    match tab.as_str() {
        "trials" => html(&experiment::trials(site, &run, &query)),
        "rungs" => html(&rungs::page(site, &run, number("bracket"))),
        "hyperparameters" => {
            let units = values(raw, "importance").first().and_then(|text| text.parse().ok());
            html(&experiment::hyperparameters(site, &run, units))
        }
        "checkpoints" => html(&experiment::checkpoints(site, &run, query.skip)),
        "configuration" => html(&experiment::configuration(site, &run)),
        "events" => html(&experiment::events(site, &run)),
        "logs" => html(&experiment::logs(site, &run, number("trial"))),
        "compare" => {
            let list = values(raw, "t").join(",");
            let show_all = !values(raw, "all").is_empty();
            html(&compare::trials(site, &run, &curves::indexes(Some(&list)), show_all))
        }
        "data.json" => large_json(move || data::data(&run)).await,
        "curves.json" => match Query::<CurvesQuery>::try_from_uri(&uri(raw)) {
            Ok(Query(query)) => {
                data_or_error(curves::of_experiment(&run, &viewer.metrics, &query).await)
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "curves.csv" => match Query::<CurvesQuery>::try_from_uri(&uri(raw)) {
            Ok(Query(query)) => match curves::of_experiment(&run, &viewer.metrics, &query).await {
                Ok(data) => curves_csv(&data),
                Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
            },
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "trials.csv" | "data.csv" => match order::export(&run, &query) {
            Ok((header, rows)) => csv(&header, &rows),
            Err(error) => wrong_filter(error),
        },
        "trials.json" => match order::export(&run, &query) {
            Ok((header, rows)) => json(&objects(&header, rows)),
            Err(error) => wrong_filter(error),
        },
        _ => {
            let text = format!("`{tab}` is not a page of an experiment.");
            message(site, StatusCode::NOT_FOUND, "Page not found", &text)
        }
    }
}

/// Returns the response to an export whose filter cannot be read.
fn wrong_filter(error: impl std::fmt::Display) -> Response {
    (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response()
}

/// Returns a URI with a query, to parse it again as another type.
fn uri(query: Option<&str>) -> axum::http::Uri {
    format!("/?{}", query.unwrap_or_default()).parse().unwrap_or_default()
}

pub(crate) async fn trial_overview(
    Extension(viewer): App,
    Path((namespace, name, index)): Path<(String, String, u32)>,
    Query(query): Query<TableQuery>,
) -> Response {
    let logs = LogsQuery::default();
    trial_page(&viewer, (&namespace, &name, index), TrialTab::Overview, &query, &logs).await
}

async fn trial_page(
    viewer: &Viewer,
    (namespace, name, index): (&str, &str, u32),
    tab: TrialTab,
    query: &TableQuery,
    logs: &LogsQuery,
) -> Response {
    let run = match find(viewer, namespace, name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    match trial::page(&viewer.site, &run, index, tab, query, logs) {
        Some(page) => html(&page),
        None => {
            let num = run.trials.len();
            let text = format!("`{name}` has no trial {index}; it has {num}.");
            message(&viewer.site, StatusCode::NOT_FOUND, "Trial not found", &text)
        }
    }
}

pub(crate) async fn trial_tab(
    Extension(viewer): App,
    Path((namespace, name, index, tab)): Path<(String, String, u32, String)>,
    Query(query): Query<TableQuery>,
    Query(logs_query): Query<LogsQuery>,
    RawQuery(raw): RawQuery,
) -> Response {
    let page = |tab| trial_page(&viewer, (&namespace, &name, index), tab, &query, &logs_query);
    match tab.as_str() {
        "metrics" => return page(TrialTab::Metrics).await,
        "attempts" => return page(TrialTab::Attempts).await,
        "logs" => return page(TrialTab::Logs).await,
        "checkpoints" => return page(TrialTab::Checkpoints).await,
        "profiler" => return page(TrialTab::Profiler).await,
        "configuration" => return page(TrialTab::Configuration).await,
        _ => {}
    }
    let run = match find(&viewer, &namespace, &name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    match tab.as_str() {
        "curves.json" => match Query::<CurvesQuery>::try_from_uri(&uri(raw.as_deref())) {
            Ok(Query(query)) => {
                data_or_error(curves::of_trial(&run, &viewer.metrics, index, &query).await)
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "curves.csv" => match Query::<CurvesQuery>::try_from_uri(&uri(raw.as_deref())) {
            Ok(Query(query)) => {
                match curves::of_trial(&run, &viewer.metrics, index, &query).await {
                    Ok(data) => series_csv(&data, "metric"),
                    Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
                }
            }
            Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
        "profiler.json" => {
            data_or_error(curves::profiler::plots(&run, &viewer.metrics, index).await)
        }
        "profiler.csv" => match curves::profiler::plots(&run, &viewer.metrics, index).await {
            Ok(data) => series_csv(&data, "title"),
            Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
        },
        "logs.json" => data_or_error(logs::logs(&run, &viewer.metrics, index, &logs_query).await),
        "logs.txt" => {
            let attempt = logs::attempt(&run, index, &logs_query).unwrap_or(0);
            match logs::text(&run, index, attempt).await {
                Ok(chunks) => {
                    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
                    download(kind, chunks).await
                }
                Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
            }
        }
        _ => {
            let text = format!("`{tab}` is not a page of a trial.");
            message(&viewer.site, StatusCode::NOT_FOUND, "Page not found", &text)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::actions::ActionAccess;
    use crate::fixture::{self, FakeApi};
    use crate::store::Store;
    use crate::visible::Visible;

    #[test]
    fn records_may_exist_while_they_cannot_be_read() {
        let status = |why: Option<&str>| {
            let why = why.map(str::to_owned);
            missing(&Site::default(), "Job", "no such job".to_owned(), why).status()
        };
        assert_eq!(status(None), StatusCode::NOT_FOUND);
        assert_eq!(status(Some("not listed")), StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test]
    async fn permissions_need_a_known_experiment() {
        let store = Arc::new(Store::default());
        store.replace(fixture::run(json!({}), json!({}), &[]));
        let actions = Arc::new(ActionAccess::new(Arc::new(FakeApi), true, String::new()));
        let site = Site { actions: Some(actions.clone()), ..Site::default() };
        let (visible, metrics) = (Visible::all(store), Arc::default());
        let viewer = Arc::new(Viewer { visible, site, metrics, session: None });
        for (namespace, is_asked) in [("elsewhere", false), ("ml", true)] {
            let path = Path((namespace.to_owned(), "iris".to_owned()));
            overview(Extension(viewer.clone()), path, Query(TableQuery::default())).await;
            assert_eq!(actions.permissions(namespace).is_ok(), is_asked, "{namespace}");
        }
    }

    #[test]
    fn names_mean_the_newest_run() {
        let run = |uid: &str, created: &str, is_running: bool| {
            let mut run = fixture::run(json!({}), json!({}), &[]);
            let metadata = &mut Arc::make_mut(&mut run.experiment).metadata;
            metadata.creation_timestamp = serde_json::from_value(json!(created)).unwrap();
            run.uid = uid.to_owned();
            run.is_running = is_running;
            Arc::new(run)
        };
        let mut runs = vec![
            run("10000000", "2026-11-21T00:00:00Z", false),
            run("20000000", "2026-11-23T00:00:00Z", false),
            run("30000000", "2026-11-22T00:00:00Z", false),
        ];
        let uid = |runs: &[Arc<Run>], name: &str| named(runs, name).map(|run| run.uid.clone());
        assert_eq!(uid(&runs, "iris").as_deref(), Some("20000000"));
        assert_eq!(uid(&runs, "iris-30000000").as_deref(), Some("30000000"));
        assert_eq!(uid(&runs, "iri"), None);
        runs.push(run("40000000", "2026-11-20T00:00:00Z", true));
        assert_eq!(uid(&runs, "iris").as_deref(), Some("40000000"), "runs precede ended ones");
    }
}
