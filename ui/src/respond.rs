//! Responses: pages, messages, JSON and CSV.

use askama::Template;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, IntoResponseParts, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use stoker_storage::StorageError;

use crate::build::plain_frame;
use crate::site::Site;
use crate::views::{MessagePage, Pair};

/// Returns a rendered page.
pub(crate) fn html(page: &impl Template) -> Response {
    match page.render() {
        Ok(text) => ([(header::CACHE_CONTROL, "no-store")], Html(text)).into_response(),
        Err(error) => {
            let text = format!("cannot render the page: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}

/// Returns a page with a message.
pub(crate) fn message(site: &Site, status: StatusCode, title: &str, text: &str) -> Response {
    let remedy = Pair { name: "All experiments".to_owned(), value: "/experiments".to_owned() };
    let page = MessagePage {
        frame: plain_frame(site, "experiments", title),
        title: title.to_owned(),
        text: text.to_owned(),
        remedy: Some(remedy),
    };
    (status, html(&page)).into_response()
}

/// Returns JSON.
pub(crate) fn json(value: &Value) -> Response {
    json_text(value.to_string())
}

fn json_text(text: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, text).into_response()
}

/// Returns JSON that may take long to build, such as the data of many trials. Other requests do not
/// wait for it.
pub(crate) async fn large_json(build: impl FnOnce() -> Value + Send + 'static) -> Response {
    match tokio::task::spawn_blocking(move || build().to_string()).await {
        Ok(text) => json_text(text),
        Err(error) => {
            let text = format!("cannot build the data: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
        }
    }
}

/// Returns the data of a plot, or the reason why there is none.
pub(crate) fn data_or_error(result: Result<Value, String>) -> Response {
    match result {
        Ok(value) => json(&value),
        Err(error) => {
            let text = json!({ "error": error }).to_string();
            let headers = [(header::CONTENT_TYPE, "application/json")];
            (StatusCode::BAD_GATEWAY, headers, text).into_response()
        }
    }
}

/// Returns a download. Waits for its first chunk: if it cannot be read, the response has a status
/// and the reason. If a later one cannot be read, the response ends early.
pub(crate) async fn download(
    headers: impl IntoResponseParts,
    chunks: impl Stream<Item = Result<Bytes, StorageError>> + Send + 'static,
) -> Response {
    let mut chunks = Box::pin(chunks);
    match chunks.try_next().await {
        Ok(first) => {
            let all = stream::iter(first.map(Ok)).chain(chunks);
            (headers, Body::from_stream(all)).into_response()
        }
        Err(error) => unread(&error),
    }
}

/// Returns the reason why a file cannot be read.
pub(crate) fn unread(error: &StorageError) -> Response {
    let status = match error {
        StorageError::NotFound { .. } => StatusCode::NOT_FOUND,
        _ => StatusCode::BAD_GATEWAY,
    };
    (status, format!("{error}\n")).into_response()
}

/// Returns a table as CSV (RFC 4180).
pub(crate) fn csv(header: &[String], rows: &[Vec<Value>]) -> Response {
    let cell = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let value = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => cell(text),
        other => cell(&other.to_string()),
    };
    let mut text = header.iter().map(|name| cell(name)).collect::<Vec<_>>().join(",");
    text.push('\n');
    for row in rows {
        text.push_str(&row.iter().map(value).collect::<Vec<_>>().join(","));
        text.push('\n');
    }
    ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], text).into_response()
}

/// Returns the drawn points of curves as CSV.
pub(crate) fn curves_csv(data: &Value) -> Response {
    let header: Vec<String> =
        ["trial".into(), text_of(&data["x"]), text_of(&data["metric"])].into();
    let mut rows = Vec::new();
    for curve in data["curves"].as_array().into_iter().flatten() {
        let points = pairs(&curve["x"], &curve["y"]);
        rows.extend(points.map(|(x, y)| vec![curve["trial"].clone(), x, y]));
    }
    csv(&header, &rows)
}

/// Returns the drawn points of several plots as CSV. `title` is the field with a plot's name.
pub(crate) fn series_csv(data: &Value, title: &str) -> Response {
    let x = if data["x"].is_string() { text_of(&data["x"]) } else { "time".to_owned() };
    let header: Vec<String> = ["metric".into(), "series".into(), x, "value".into()].into();
    let mut rows = Vec::new();
    for plot in data["plots"].as_array().into_iter().flatten() {
        for series in plot["series"].as_array().into_iter().flatten() {
            let points = pairs(&series["x"], &series["y"]);
            let names = (plot[title].clone(), series["name"].clone());
            rows.extend(points.map(|(x, y)| vec![names.0.clone(), names.1.clone(), x, y]));
        }
    }
    csv(&header, &rows)
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn pairs<'a>(xs: &'a Value, ys: &'a Value) -> impl Iterator<Item = (Value, Value)> + 'a {
    let of = |values: &'a Value| values.as_array().into_iter().flatten().cloned();
    of(xs).zip(of(ys))
}

/// Returns the rows of a table as objects with the names in `header`.
pub(crate) fn objects(header: &[String], rows: Vec<Vec<Value>>) -> Value {
    let object = |row: Vec<Value>| {
        let fields = header.iter().cloned().zip(row);
        Value::Object(fields.collect())
    };
    rows.into_iter().map(object).collect()
}

/// Returns objects with the same fields as CSV.
pub(crate) fn csv_of(rows: &[Value]) -> Response {
    let header: Vec<String> = rows
        .first()
        .and_then(Value::as_object)
        .map(|row| row.keys().cloned().collect())
        .unwrap_or_default();
    let row = |row: &Value| header.iter().map(|name| row[name.as_str()].clone()).collect();
    csv(&header, &rows.iter().map(row).collect::<Vec<_>>())
}
