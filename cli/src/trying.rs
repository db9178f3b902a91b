//! `--test`: an experiment cut down to one batch, a validation, a checkpoint and its restore.

use std::path::{Path, PathBuf};

use serde_json::json;
use stoker_api::experiment::{DesiredState, EnvVar, Length, SingleSearch, Unit};
use stoker_api::names::{ENV_TEST, experiment_path};
use stoker_api::validate::validate;
use stoker_storage::Storage;

use crate::failure::Failure;
use crate::file::Loaded;
use crate::place::Place;
use crate::run::{Paths, record};

/// What the name of an experiment that is tried ends with.
const SUFFIX: &str = "-test";
/// The longest name of an experiment.
const NAME_MAX: usize = 40;

/// What `loaded` is tried as: one trial of one batch, whose hyperparameters are drawn once and which is
/// not started again.
///
/// # Errors
///
/// It cannot be cut down.
pub(crate) fn cut_down(mut loaded: Loaded) -> Result<Loaded, Failure> {
    let mut spec = loaded.valid.spec.clone();
    let searcher = &mut spec.searcher;
    (searcher.random, searcher.grid) = (None, None);
    searcher.single = Some(SingleSearch {});
    searcher.max_length = Length::new(Unit::Batches, 1);
    (spec.min_validation_period, spec.min_checkpoint_period) = (None, None);
    spec.perform_initial_validation = false;
    spec.max_restarts = 0;
    spec.state = DesiredState::Active;
    spec.env.retain(|it| it.name != ENV_TEST);
    spec.env.push(EnvVar { name: ENV_TEST.to_owned(), value: "1".to_owned() });
    let stem = &loaded.name[..loaded.name.len().min(NAME_MAX - SUFFIX.len())];
    let name = format!("{}{SUFFIX}", stem.trim_end_matches('-'));
    loaded.valid = validate(&name, &spec).map_err(|errors| {
        let errors = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Failure::Input(format!("the experiment cannot be tried: {errors}"))
    })?;
    loaded.spec_json = json!(loaded.valid.spec);
    loaded.name = name;
    Ok(loaded)
}

/// A folder of a test's own, for its record, and for its files where nobody says where they go.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(std::env::temp_dir().join(format!("stoker-test-{}", record::random_hex(8)?)))
}

/// Where a test's files and its record lie: the record is never beside those of experiments.
pub(crate) fn place(own: &Path, flag: Option<&str>, file: Option<&str>) -> Result<Place, Failure> {
    match (flag, file) {
        (None, None) => Place::resolve(own.to_str(), None),
        _ => Ok(Place { local: own.to_owned(), ..Place::resolve(flag, file)? }),
    }
}

/// Deletes all that a test has left.
pub(crate) async fn clean(own: &Path, storage: &Storage, paths: &Paths) -> Result<(), Failure> {
    let folder = experiment_path(&paths.namespace, &paths.name, &paths.uid);
    storage.delete_folder(&format!("{folder}/")).await?;
    std::fs::remove_dir_all(own).map_err(|error| Failure::file("delete", own, error))
}
