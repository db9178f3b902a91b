//! Location of a data set: from the experiment, in the cache of `scripts/fetch-data`, or in the
//! container image.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use stoker_trainer::datasets::{Cache, fetch};
use stoker_trainer::{Context, Result};

/// Location of a data set's files: the experiment's `data`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataConfig {
    /// A path, or a URL with the scheme file, http, https, s3, gs or az.
    #[serde(default)]
    root: Option<String>,
    /// SHA-256 in hex by file name. Files without an entry are not verified.
    #[serde(default)]
    sha256: BTreeMap<String, String>,
}

/// Directory of the data sets that `scripts/build-images --data` adds to the image.
const IN_THE_IMAGE: &str = "/usr/local/share/stoker/data";

/// Remedy for a missing file.
const REMEDY: &str = "run scripts/fetch-data, or for pods scripts/build-images --data, or set \
                      data.root in the experiment to the directory or URL of the files";

impl DataConfig {
    /// Returns the location that the experiment specifies. The default is the directory `name` in
    /// the cache, or in the image if only the image has this directory.
    pub(crate) fn new(context: &Context, name: &str) -> Result<Self> {
        let mut data: Self = context.data()?;
        if data.root.is_none() {
            let cached = Cache::standard()?.folder().join(name);
            let in_image = Path::new(IN_THE_IMAGE).join(name);
            let folder = if in_image.exists() && !cached.exists() { in_image } else { cached };
            data.root = Some(folder.to_string_lossy().into_owned());
        }
        Ok(data)
    }

    /// Returns the local path of the first of `names` that exists. Remote files are downloaded.
    pub(crate) fn file(&self, names: &[&str]) -> Result<PathBuf> {
        let root = self.root.as_deref().unwrap_or_default().trim_end_matches('/');
        let mut first = None;
        for name in names {
            let sha256 = self.sha256.get(*name).map(String::as_str);
            match fetch(&format!("{root}/{name}"), sha256) {
                Ok(path) => return Ok(path),
                Err(error) if error.is_missing() => first = first.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
        let error = first.map_or_else(|| "no file name given".into(), |error| error.to_string());
        Err(format!("{error} ({REMEDY})").into())
    }
}

/// Creates a test from the text of an experiment file.
#[cfg(test)]
pub(crate) fn test_of(experiment: &str) -> stoker_trainer::testing::TrialTest {
    let experiment: serde_json::Value = serde_saphyr::from_str(experiment).unwrap();
    stoker_trainer::testing::TrialTest::from_experiment(&experiment).unwrap()
}
