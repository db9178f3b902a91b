//! Checkpoints: manifest and download.

use axum::extract::{Extension, Path};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use stoker_api::contract::Manifest;
use stoker_api::trial::CheckpointRecord;
use stoker_storage::{StorageError, layout};

use crate::build::table::TableQuery;
use crate::build::trial::head;
use crate::respond::{download, html, message, unread};
use crate::server::{App, find};
use crate::site::Site;
use crate::store::Run;
use crate::text;
use crate::views::{CheckpointPage, Fact, FileRow, TrialTab};

/// Bytes of one request to the storage during a download.
const CHUNK_BYTES: u64 = 8 << 20;

/// Page of a checkpoint.
pub(crate) async fn checkpoint(
    Extension(viewer): App,
    Path((namespace, name, index, checkpoint)): Path<(String, String, u32, String)>,
) -> Response {
    let run = match find(&viewer, &namespace, &name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    let record = run.trials.get(&index);
    let known = record
        .and_then(|trial| trial.status.checkpoints.iter().find(|known| known.name == checkpoint));
    let (Some(trial), Some(known)) = (record, known) else {
        let text = format!("Trial {index} of `{name}` has no checkpoint `{checkpoint}` now.");
        return message(&viewer.site, StatusCode::NOT_FOUND, "Checkpoint not found", &text);
    };
    let manifest = manifest(&run, index, &checkpoint).await.map_err(Unusable::into_reason);
    let base = format!("{}/checkpoints/{checkpoint}", run.trial_base(index));
    let query = TableQuery::default();
    html(&CheckpointPage {
        trial: head(&viewer.site, &run, trial, TrialTab::Checkpoints, &query),
        address: run.checkpoint_address(index, &checkpoint),
        facts: facts(&run, known),
        files: manifest
            .as_ref()
            .map_or_else(|_| Vec::new(), |(manifest, _)| files(&base, manifest)),
        manifest: manifest.map(|(_, text)| text),
        command: download_command(&viewer.site, &run, index, &checkpoint),
        name: checkpoint,
    })
}

fn facts(run: &Run, known: &CheckpointRecord) -> Vec<Fact> {
    let fact = |label: String, value: String| Fact { label, value, ..Fact::default() };
    let metric = text::name(&run.experiment.spec.searcher.metric);
    vec![
        fact("Batches".to_owned(), text::count(known.batches)),
        fact(metric, text::result_text(known.metric.as_deref())),
        fact("Size".to_owned(), text::bytes(known.bytes)),
    ]
}

/// Returns the command that downloads a checkpoint.
fn download_command(site: &Site, run: &Run, index: u32, checkpoint: &str) -> String {
    let (name, namespace) = match site.is_cluster {
        true => (run.name.clone(), format!(" -n {}", run.namespace)),
        false => (run.id(), String::new()),
    };
    let trial = format!("{name}-{index}/{checkpoint}");
    site.command(&format!("stoker checkpoint download {trial} --to DIR{namespace}"))
}

/// Why a manifest cannot be shown.
enum Unusable {
    Unread(StorageError),
    Other(String),
}

impl Unusable {
    fn into_reason(self) -> String {
        match self {
            Self::Unread(error) => error.to_string(),
            Self::Other(why) => why,
        }
    }
}

async fn manifest(run: &Run, index: u32, name: &str) -> Result<(Manifest, String), Unusable> {
    let storage = run.storage.as_ref().map_err(|why| Unusable::Other(why.clone()))?;
    let path = layout::manifest_path(&run.trial_path(index), name);
    let bytes = storage.get(&path).await.map_err(Unusable::Unread)?;
    let manifest = Manifest::parse(&bytes);
    let manifest = manifest.map_err(|error| Unusable::Other(format!("{path}: {error}")))?;
    Ok((manifest, text::escape(&String::from_utf8_lossy(&bytes))))
}

fn files(base: &str, manifest: &Manifest) -> Vec<FileRow> {
    let row = |(name, file): (&String, &stoker_api::contract::FileEntry)| FileRow {
        href: format!(
            "{base}/files/{}",
            name.split('/').map(text::query).collect::<Vec<_>>().join("/")
        ),
        name: text::name(name),
        size: text::bytes(file.bytes),
        hash: file.hash.to_string(),
    };
    manifest.files.iter().map(row).collect()
}

/// Download of a file. Only files of the manifest can be downloaded.
pub(crate) async fn file(
    Extension(viewer): App,
    Path((namespace, name, index, checkpoint, file)): Path<(String, String, u32, String, String)>,
) -> Response {
    let run = match find(&viewer, &namespace, &name).await {
        Ok(run) => run,
        Err(response) => return *response,
    };
    let is_known = run
        .trials
        .get(&index)
        .is_some_and(|trial| trial.status.checkpoints.iter().any(|known| known.name == checkpoint));
    if !is_known {
        return (StatusCode::NOT_FOUND, "no such checkpoint\n").into_response();
    }
    let size = match manifest(&run, index, &checkpoint).await {
        Ok((manifest, _)) => manifest.files.get(&file).map(|file| file.bytes),
        Err(Unusable::Unread(error)) => return unread(&error),
        Err(Unusable::Other(why)) => return (StatusCode::BAD_GATEWAY, why).into_response(),
    };
    let (Some(size), Ok(storage)) = (size, run.storage.clone()) else {
        return (StatusCode::NOT_FOUND, "no such file in the manifest\n").into_response();
    };
    let path = layout::checkpoint_file(&run.trial_path(index), &checkpoint, &file);
    let chunks = stream::unfold(0, move |start| {
        let (storage, path) = (storage.clone(), path.clone());
        async move {
            if start >= size {
                return None;
            }
            let end = (start + CHUNK_BYTES).min(size);
            let bytes = storage.get_range(&path, start..end).await;
            Some((bytes, end))
        }
    });
    // Names of files come from the program, so only plain characters reach the header.
    let plain = |char: &char| char.is_ascii_alphanumeric() || matches!(char, '.' | '-' | '_');
    let saved_as: String =
        file.rsplit('/').next().unwrap_or_default().chars().filter(plain).collect();
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, size.to_string()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{saved_as}\"")),
    ];
    download(headers, chunks).await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::to_bytes;
    use serde_json::json;
    use stoker_storage::Storage;

    use super::*;
    use crate::fixture;
    use crate::store::Store;
    use crate::viewer::Viewer;
    use crate::visible::Visible;

    #[tokio::test]
    async fn failed_downloads_name_the_reason() {
        let checkpoint = json!({"name": "64-0", "batches": 64, "manifestSha256": "", "bytes": 4});
        let trial = json!({ "checkpoints": [checkpoint] });
        let storage = Arc::new(Storage::open("memory://", None).unwrap());
        let run = fixture::run(json!({}), json!({}), &[trial]).with_storage(Ok(storage.clone()));
        let trial_path = run.trial_path(0);
        let store = Arc::new(Store::default());
        store.replace(run);
        let (visible, metrics) = (Visible::all(store), Arc::default());
        let site = Site::default();
        let viewer = Arc::new(Viewer { visible, site, metrics, session: None });
        let get = async || {
            let [namespace, name, checkpoint, file] =
                ["ml", "iris", "64-0", "weights"].map(str::to_owned);
            let path = Path((namespace, name, 0, checkpoint, file));
            let response = super::file(Extension(viewer.clone()), path).await;
            let status = response.status().as_u16();
            let text = to_bytes(response.into_body(), 1 << 20).await.unwrap();
            (status, String::from_utf8_lossy(&text).into_owned())
        };
        let put = async |path: String, text: &str| {
            storage.put(&path, text.to_owned().into()).await.unwrap();
        };
        let (status, text) = get().await;
        assert!(status == 404 && text.contains("manifest.json"), "{status} {text}");
        let file = json!({"bytes": 4, "sha256": "00"});
        let manifest = json!({"format": 1, "experimentId": "", "trial": 0, "attempt": 0,
            "batches": 64, "files": {"weights": file}});
        put(layout::manifest_path(&trial_path, "64-0"), &manifest.to_string()).await;
        let (status, text) = get().await;
        assert!(status == 404 && text.contains("weights"), "{status} {text}");
        put(layout::checkpoint_file(&trial_path, "64-0", "weights"), "abcd").await;
        assert_eq!(get().await, (200, "abcd".to_owned()));
    }

    #[test]
    fn metric_of_a_checkpoint_is_escaped() {
        let length = json!({"batches": 4});
        let searcher =
            json!({"metric": "los\u{202e}s", "maxLength": length, "random": {"maxTrials": 8}});
        let run = fixture::run(json!({ "searcher": searcher }), json!({}), &[]);
        let known = json!({"name": "64-0", "batches": 64, "manifestSha256": "", "bytes": 1});
        let known: CheckpointRecord = serde_json::from_value(known).unwrap();
        assert_eq!(facts(&run, &known)[1].label, r"los\u{202e}s");
    }

    #[test]
    fn download_command_names_the_trial() {
        let run = fixture::run(json!({}), json!({}), &[]);
        let check = |is_cluster: bool, arguments: &str, expected: &str| {
            let site = Site { is_cluster, arguments: arguments.to_owned(), ..Site::default() };
            let command = download_command(&site, &run, 3, "64-0");
            assert_eq!(command, format!("stoker checkpoint download {expected}"));
        };
        // On a cluster, trials are found by the name of their object.
        check(true, "", "iris-3/64-0 --to DIR -n ml");
        check(true, "--context lab", "iris-3/64-0 --to DIR -n ml --context lab");
        check(false, "--root runs", "iris-01234567-3/64-0 --to DIR --root runs");
    }
}
