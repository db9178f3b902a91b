//! Inputs that are the output of another job: only the parts in its manifest count.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use stoker_api::inference::{FILES_FORMAT, OutputManifest, STATE_FOLDER, is_part_name};
use stoker_api::names::MANIFEST;

use super::{ListedFile, Pattern};

/// Output of a job in a directory.
#[derive(Clone, Debug, PartialEq)]
pub enum JobOutput {
    /// The directory is not the output directory of a job. Files with names of parts may be copies.
    None,
    /// The job has not completed: it has no manifest yet.
    Unfinished,
    /// The manifest of the completed job.
    Complete(Box<OutputManifest>),
}

impl JobOutput {
    /// Returns the output of a directory with this manifest, if it has one. `has_state` is whether
    /// it contains plans and commits.
    pub fn new(manifest: Option<&[u8]>, has_state: bool) -> Self {
        let parsed = manifest.map(serde_json::from_slice::<OutputManifest>);
        match parsed {
            Some(Ok(manifest)) if manifest.format == FILES_FORMAT => {
                Self::Complete(Box::new(manifest))
            }
            None if has_state => Self::Unfinished,
            _ => Self::None,
        }
    }

    /// Reads the output of a local directory.
    ///
    /// # Errors
    ///
    /// Fails if the directory or its manifest cannot be read.
    pub fn in_local(folder: &Path) -> io::Result<Self> {
        let manifest = match fs::read(folder.join(MANIFEST)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            manifest => Some(manifest?),
        };
        Ok(Self::new(manifest.as_deref(), folder.join(STATE_FOLDER).try_exists()?))
    }
}

/// Lists local input files, sorted by name: files below `folder` that match, except those in the
/// directory `without`, also if it is reached by a symbolic link. Follows the manifests of other
/// jobs, as [`follow_manifests`] does.
///
/// # Errors
///
/// Fails, with the path, if a file or directory that may match cannot be read, or as
/// [`follow_manifests`] does.
pub fn list_local(
    folder: &Path,
    pattern: &Pattern,
    without: Option<&Path>,
) -> Result<Vec<ListedFile>, String> {
    let mut files = pattern.list_files(folder, without)?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    follow_manifests(files, pattern, |below| {
        let folder = folder.join(below);
        JobOutput::in_local(&folder).map_err(|error| format!("{}: {error}", folder.display()))
    })
}

/// Returns the files without those of other jobs' outputs that are not rows: manifests, rejected
/// rows, and parts that the manifest does not list, for example of a process that was considered
/// dead. `files` are sorted by name, and match `pattern`. `output_in` returns the output in a
/// directory, which is given as a path below the input's directory. It is called for each directory
/// with a `manifest.json` or files that have the names of parts.
///
/// # Errors
///
/// Fails if a job has not completed, and if a part in its manifest is missing or has another size.
pub fn follow_manifests<E: From<String>>(
    files: Vec<ListedFile>,
    pattern: &Pattern,
    mut output_in: impl FnMut(&str) -> Result<JobOutput, E>,
) -> Result<Vec<ListedFile>, E> {
    let is_meant = |name: &str| name == MANIFEST || is_part_name(name);
    let folders: BTreeSet<&str> = files
        .iter()
        .map(|file| split(&file.name))
        .filter(|at| is_meant(at.1))
        .map(|at| at.0)
        .collect();
    let mut ignored = BTreeSet::new();
    for folder in folders {
        match output_in(folder)? {
            JobOutput::None => {}
            JobOutput::Complete(manifest) => {
                check_parts(folder, &manifest, &files, pattern)?;
                let listed: BTreeSet<&str> =
                    manifest.parts.iter().map(|part| part.name.as_str()).collect();
                let errors = manifest.errors.as_ref().map(|errors| errors.name.as_str());
                let is_ignored = |name: &str| {
                    let is_unlisted = is_part_name(name) && !listed.contains(name);
                    name == MANIFEST || Some(name) == errors || is_unlisted
                };
                let of_folder = files.iter().map(|file| (file, split(&file.name)));
                let of_folder = of_folder.filter(|(_, at)| at.0 == folder && is_ignored(at.1));
                ignored.extend(of_folder.map(|(file, _)| file.name.clone()));
            }
            JobOutput::Unfinished => {
                let place = if folder.is_empty() { "the directory" } else { folder };
                return Err(E::from(format!(
                    "{place} is the output of a job that has not completed: it has no {MANIFEST}; \
                     wait until that job has completed, or copy the parts to another directory"
                )));
            }
        }
    }
    Ok(files.into_iter().filter(|file| !ignored.contains(&file.name)).collect())
}

/// Fails if a part that matches is missing or has another size.
fn check_parts(
    folder: &str,
    manifest: &OutputManifest,
    files: &[ListedFile],
    pattern: &Pattern,
) -> Result<(), String> {
    for part in &manifest.parts {
        let name = match folder.is_empty() {
            true => part.name.clone(),
            false => format!("{folder}/{}", part.name),
        };
        if !pattern.is_match(&name) {
            continue;
        }
        let found = files.binary_search_by(|file| file.name.as_str().cmp(&name)).ok();
        let bytes = found.map(|at| files[at].bytes);
        if bytes != Some(part.bytes) {
            let found = bytes.map_or("it is missing".into(), |bytes| format!("it has {bytes}"));
            return Err(format!(
                "{MANIFEST} of job {} lists {name} with {} bytes, but {found}; run that job again",
                manifest.job, part.bytes
            ));
        }
    }
    Ok(())
}

/// Splits a path into its directory and its name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PARTS: [&str; 2] =
        ["part-00000-of-00002-0b3f9c1e-1.jsonl", "part-00001-of-00002-0b3f9c1e-3.jsonl"];
    const LATE: &str = "part-00001-of-00002-0b3f9c1e-2.jsonl";
    const ERRORS: &str = "errors-0b3f9c1e.jsonl";

    /// Returns a directory with the output of a job below `predictions`, and other files.
    fn output() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("predictions");
        fs::create_dir_all(folder.join(STATE_FOLDER)).unwrap();
        for name in [PARTS[0], PARTS[1], LATE, ERRORS, "more.jsonl"] {
            fs::write(folder.join(name), "text").unwrap();
        }
        fs::write(root.path().join("own.jsonl"), "text").unwrap();
        let part = |name: &&str| {
            json!({
                "name": name, "bytes": 4, "sha256": "", "rows": 1, "file": 0, "firstRow": 0,
                "inputRows": 1,
            })
        };
        let manifest = json!({
            "format": FILES_FORMAT, "job": "species", "jobId": "0b3f9c1e", "input": [],
            "outputFormat": "jsonLines", "rows": 2, "inputRows": 3, "rejected": 1,
            "parts": PARTS.iter().map(part).collect::<Vec<_>>(),
            "errors": {"name": ERRORS, "bytes": 4, "sha256": "", "rows": 1},
        });
        fs::write(folder.join(MANIFEST), manifest.to_string()).unwrap();
        root
    }

    fn list(folder: &Path, pattern: &str) -> Result<Vec<String>, String> {
        let pattern = Pattern(pattern.split('/').map(str::to_owned).collect());
        let pattern = if pattern.0 == [""] { Pattern(vec![]) } else { pattern };
        let files = list_local(folder, &pattern, None)?;
        Ok(files.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn only_parts_in_the_manifest_are_input() {
        let root = output();
        let folder = root.path().join("predictions");
        assert_eq!(list(&folder, "").unwrap(), ["more.jsonl", PARTS[0], PARTS[1]]);
        assert_eq!(list(&folder, "part-*").unwrap(), PARTS);
        assert_eq!(list(&folder, "part-00001*").unwrap(), PARTS[1..]);
        // Rejected rows are input if they are named.
        assert_eq!(list(&folder, "errors-*").unwrap(), [ERRORS]);
        let below = PARTS.map(|name| format!("predictions/{name}"));
        let all = [vec!["own.jsonl".into(), "predictions/more.jsonl".into()], below.to_vec()];
        assert_eq!(list(root.path(), "").unwrap(), all.concat());
        // Copies of parts, and directories with other manifests, are ordinary files.
        fs::write(folder.join(MANIFEST), "{}").unwrap();
        assert_eq!(list(&folder, "part-*").unwrap(), [PARTS[0], LATE, PARTS[1]]);
    }

    #[test]
    fn incomplete_outputs_are_refused() {
        let root = output();
        let folder = root.path().join("predictions");
        let check = |pattern: &str, part: &str| {
            let error = list(&folder, pattern).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        fs::write(folder.join(PARTS[0]), "longer").unwrap();
        check("", "lists part-00000-of-00002-0b3f9c1e-1.jsonl with 4 bytes, but it has 6");
        assert_eq!(list(&folder, "part-00001*").unwrap(), PARTS[1..]);
        fs::remove_file(folder.join(PARTS[0])).unwrap();
        check("part-*", "but it is missing; run that job again");
        fs::remove_file(folder.join(MANIFEST)).unwrap();
        check("", "the directory is the output of a job that has not completed");
        assert!(list(root.path(), "").unwrap_err().starts_with("predictions is the output"));
        assert_eq!(list(&folder, "errors-*").unwrap(), [ERRORS]);
        fs::remove_dir(folder.join(STATE_FOLDER)).unwrap();
        assert_eq!(list(&folder, "part-*").unwrap(), [LATE, PARTS[1]]);
    }
}
