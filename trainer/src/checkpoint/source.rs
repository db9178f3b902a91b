//! Checkpoints of other trials, by what people know of them.

use std::path::{Path, PathBuf};

use stoker_api::contract::{Manifest, StorageConfig};
use stoker_api::names::MANIFEST;
use stoker_storage::{Storage, hash, layout};

use super::{Parts, Place, load_folder, parse};
use crate::Result;

/// Where a model's weights are.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointSource {
    place: Where,
    which: Which,
    /// What its manifest must hash to.
    sha256: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Where {
    Folder(PathBuf),
    Trial(String),
    Stored { url: String, endpoint: Option<String>, trial_path: String },
}

#[derive(Clone, Debug, PartialEq)]
enum Which {
    Latest,
    Smallest,
    Largest,
    Named(String),
}

impl From<&Path> for CheckpointSource {
    fn from(folder: &Path) -> Self {
        Self::folder(folder)
    }
}

impl From<&PathBuf> for CheckpointSource {
    fn from(folder: &PathBuf) -> Self {
        Self::folder(folder)
    }
}

impl From<PathBuf> for CheckpointSource {
    fn from(folder: PathBuf) -> Self {
        Self::folder(folder)
    }
}

impl CheckpointSource {
    fn new(place: Where) -> Self {
        Self { place, which: Which::Latest, sha256: None }
    }

    /// A checkpoint's folder on this machine, such as one that was downloaded.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        Self::new(Where::Folder(path.into()))
    }

    /// The latest checkpoint of a trial of this name, such as `mnist-3`, in the storage and the namespace
    /// of the session that asks.
    pub fn trial(name: &str) -> Self {
        Self::new(Where::Trial(name.into()))
    }

    /// The latest checkpoint of a trial in any storage: the storage's root as in `checkpointStorage.url`,
    /// and the trial's folder below it, such as `default/mnist-0b3f9c1e/trials/3`.
    pub fn stored(root: &str, trial_path: &str) -> Self {
        let (url, trial_path) = (root.to_owned(), trial_path.trim_matches('/').to_owned());
        Self::new(Where::Stored { url, endpoint: None, trial_path })
    }

    /// The address of an S3 server other than Amazon's, for [`stored`](Self::stored).
    #[must_use]
    pub fn endpoint(mut self, address: &str) -> Self {
        if let Where::Stored { endpoint, .. } = &mut self.place {
            *endpoint = Some(address.into());
        }
        self
    }

    /// The checkpoint with the smallest searched metric, in place of the latest: of those that were
    /// saved where a validation was.
    #[must_use]
    pub fn smallest_metric(self) -> Self {
        Self { which: Which::Smallest, ..self }
    }

    /// As [`smallest_metric`](Self::smallest_metric), with the largest.
    #[must_use]
    pub fn largest_metric(self) -> Self {
        Self { which: Which::Largest, ..self }
    }

    /// The checkpoint of this name, such as `000000000400-0`, in place of the latest.
    #[must_use]
    pub fn named(self, checkpoint: &str) -> Self {
        Self { which: Which::Named(checkpoint.into()), ..self }
    }

    /// Only with a manifest of this SHA-256.
    pub(super) fn with_manifest(self, sha256: &str) -> Self {
        Self { sha256: Some(sha256.to_owned()), ..self }
    }

    pub(super) fn location(&self) -> &Where {
        &self.place
    }

    /// Reads it; `own` is where the session that asks keeps its files.
    ///
    /// # Errors
    ///
    /// There is no such trial, or no whole checkpoint of this kind.
    pub(crate) fn load(&self, own: &StorageConfig) -> Result<(Manifest, Parts)> {
        if let Where::Folder(folder) = &self.place {
            self.check_folder(folder)?;
            return Ok(load_folder(folder)?);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let place = self.place(own).await?;
            let (name, manifest, _) = self.choose(&place).await?;
            let parts = place.parts(&name, &manifest).await?;
            Ok((manifest, parts))
        })
    }

    /// That the manifest is the one that was chosen, where one was.
    fn check_folder(&self, folder: &Path) -> Result<()> {
        let Some(expected) = &self.sha256 else { return Ok(()) };
        let path = folder.join(MANIFEST);
        let found = std::fs::read(&path).map(|it| hash::sha256_hex(&it));
        if found.ok().as_ref() == Some(expected) {
            return Ok(());
        }
        Err(format!("{} is not the one that was chosen when the job began", path.display()).into())
    }

    pub(super) async fn place(&self, own: &StorageConfig) -> Result<Place> {
        let (storage, trial_path) = match &self.place {
            Where::Stored { url, endpoint, trial_path } => {
                (Storage::open(url, endpoint.as_deref())?, trial_path.clone())
            }
            Where::Trial(name) => {
                if own.url.is_empty() {
                    let text = format!("trial {name}: this program has no storage to look into");
                    return Err(text.into());
                }
                let storage = Storage::open(&own.url, own.endpoint.as_deref())?;
                let path = find_trial(&storage, &own.trial_path, name).await?;
                (storage, path)
            }
            Where::Folder(_) => return Err("a folder is in no storage".into()),
        };
        Ok(Place { storage, trial_path, experiment_id: String::new(), trial: 0, attempt: 0 })
    }

    /// The checkpoint that is meant.
    pub(super) async fn choose(&self, place: &Place) -> Result<(String, Manifest, String)> {
        let trial = &place.trial_path;
        let mut names = place.storage.folders(&layout::checkpoints_path(trial)).await?;
        names.retain(|name| layout::parse_checkpoint_name(name).is_some());
        names.sort_by_key(|name| std::cmp::Reverse(layout::parse_checkpoint_name(name)));
        if let Which::Named(wanted) = &self.which {
            names.retain(|name| name == wanted);
        }
        let mut best: Option<(f64, String, Manifest, String)> = None;
        for name in names {
            let path = layout::manifest_path(trial, &name);
            // Without a manifest, these are files of a save that was cut short.
            if !place.storage.exists(&path).await? {
                continue;
            }
            let text = place.storage.get(&path).await?;
            let sha256 = hash::sha256_hex(&text);
            let manifest =
                parse(&text).map_err(|why| format!("checkpoint {name} of {trial}: {why}"))?;
            if self.sha256.as_ref().is_some_and(|it| *it != sha256) {
                return Err(
                    format!("checkpoint {name} of {trial} is not the one that was chosen").into()
                );
            }
            let sign = match self.which {
                Which::Latest | Which::Named(_) => return Ok((name, manifest, sha256)),
                Which::Smallest => 1.0,
                Which::Largest => -1.0,
            };
            let metric = manifest.metric.as_ref().and_then(|it| it.parse::<f64>().ok());
            let metric = metric.filter(|it| !it.is_nan()).map(|it| sign * it);
            // Of equal ones the latest, which comes first.
            if let Some(metric) = metric
                && best.as_ref().is_none_or(|(best, ..)| metric < *best)
            {
                best = Some((metric, name, manifest, sha256));
            }
        }
        match (best, &self.which) {
            (Some((_, name, manifest, sha256)), _) => Ok((name, manifest, sha256)),
            (None, Which::Named(name)) => {
                Err(format!("{trial} has no whole checkpoint {name}").into())
            }
            (None, Which::Latest) => Err(format!("{trial} has no whole checkpoint").into()),
            (None, _) => Err(format!("{trial} has no whole checkpoint with a metric").into()),
        }
    }
}

/// The folder of the trial of a name, such as `mnist-3`, in the namespace in which `own` is.
async fn find_trial(storage: &Storage, own: &str, name: &str) -> Result<String> {
    let refused = || format!("{name:?} is no name of a trial, such as mnist-3");
    let (experiment, index) = name.rsplit_once('-').ok_or_else(refused)?;
    index.parse::<u32>().map_err(|_| refused())?;
    let namespace = own.split('/').next().unwrap_or_default();
    let is_named = |folder: &String| {
        folder.rsplit_once('-').is_some_and(|(it, uid)| it == experiment && uid.len() == 8)
    };
    let mut found = vec![];
    for folder in storage.folders(namespace).await?.into_iter().filter(is_named) {
        let trials = format!("{namespace}/{folder}/trials");
        if storage.folders(&trials).await?.iter().any(|it| it == index) {
            found.push(format!("{trials}/{index}"));
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(format!("{} has no trial {name} in {namespace}/", storage.url()).into()),
        _ => Err(format!(
            "{name} may be any of {}: say which by CheckpointSource::stored",
            found.join(", ")
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Writes checkpoints of a trial: name, metric, and whether it is whole.
    fn write(root: &Path, trial: &str, checkpoints: &[(&str, Option<&str>, bool)]) {
        for (name, metric, is_whole) in checkpoints {
            let folder = root.join(trial).join("checkpoints").join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("x"), name).unwrap();
            let entry = stoker_api::contract::FileEntry {
                bytes: name.len() as u64,
                sha256: stoker_storage::hash::sha256_hex(name.as_bytes()),
            };
            let manifest = Manifest {
                format: 1,
                experiment_id: "e".into(),
                trial: 3,
                attempt: 0,
                batches: 1,
                metric: metric.map(str::to_owned),
                files: BTreeMap::from([("x".to_owned(), entry)]),
                unsent: vec![],
                metadata: BTreeMap::new(),
            };
            if *is_whole {
                let text = serde_json::to_vec(&manifest).unwrap();
                std::fs::write(folder.join(MANIFEST), text).unwrap();
            }
        }
    }

    #[test]
    fn a_trials_checkpoint_is_found_by_what_is_known_of_it() {
        let root = tempfile::tempdir().unwrap();
        let mnist = "ml/mnist-0b3f9c1e/trials/3";
        let checkpoints = [
            ("000000000100-0", Some("0.5"), true),
            ("000000000200-0", Some("0.25"), true),
            ("000000000300-1", None, true),
            ("000000000400-1", Some("0.1"), false),
        ];
        write(root.path(), mnist, &checkpoints);
        write(root.path(), "ml/mnist-large-0b3f9c1e/trials/3", &[]);
        write(root.path(), "ml/twice-00000001/trials/0", &checkpoints);
        write(root.path(), "ml/twice-00000002/trials/0", &checkpoints);
        let url = root.path().display().to_string();
        let own = StorageConfig {
            url: url.clone(),
            endpoint: None,
            trial_path: "ml/other-12345678/trials/0".into(),
        };
        let check = |source: CheckpointSource, expected: Result<&str, &str>| {
            let found = source.load(&own).map(|(_, parts)| parts["x"].clone());
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected.as_bytes(), "{source:?}"),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}, not {expected}");
                }
                (found, expected) => panic!("{source:?}: {found:?}, not {expected:?}"),
            }
        };
        let trial = || CheckpointSource::trial("mnist-3");
        check(trial(), Ok("000000000300-1"));
        check(trial().smallest_metric(), Ok("000000000200-0"));
        check(trial().largest_metric(), Ok("000000000100-0"));
        check(trial().named("000000000100-0"), Ok("000000000100-0"));
        check(trial().named("000000000400-1"), Err("has no whole checkpoint 000000000400-1"));
        check(CheckpointSource::stored(&url, mnist), Ok("000000000300-1"));
        let folder = root.path().join(mnist).join("checkpoints/000000000200-0");
        check(CheckpointSource::folder(folder), Ok("000000000200-0"));
        check(CheckpointSource::trial("mnist-4"), Err("has no trial mnist-4 in ml/"));
        check(CheckpointSource::trial("mnist"), Err("no name of a trial"));
        check(CheckpointSource::trial("twice-0"), Err("ml/twice-00000001/trials/0, ml/twice-0000"));
        let large = root.path().join(mnist).join("checkpoints/000000000300-1/x");
        std::fs::write(large, "changed").unwrap();
        check(trial(), Err("x has 7 bytes"));
    }
}
