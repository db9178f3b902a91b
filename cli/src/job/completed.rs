//! Checks of a completed job that runs again: its output is complete, and its input is unchanged.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use stoker_api::contract::HashAlgorithm;
use stoker_api::inference::{InferenceInput, InputFile, OutputManifest};
use stoker_api::names::MANIFEST;
use stoker_storage::Storage;
use stoker_storage::hash::FileHasher;
use stoker_storage::input::{ListedFile, Pattern, first_difference, list_local};

use super::manifest::{ManifestError, read_manifest};
use crate::failure::Failure;

/// Number of bytes of an input file that are read at once.
const BUFFER_BYTES: usize = 1 << 20;
/// Maximum number of concurrent requests for the sizes of output files.
const SIZES_MAX: usize = 32;
/// Minimum number of output files for which a bucket is listed. S3 lists as many per request.
const LISTED_MIN: usize = 1000;

/// A completed job.
#[derive(Debug)]
pub(super) struct CompletedJob<'a> {
    /// Run ID.
    pub(super) id: &'a str,
    /// UID of the job, which the manifest of its output contains.
    pub(super) uid: &'a str,
    /// Working directory of the program.
    pub(super) folder: &'a Path,
    pub(super) input: &'a InferenceInput,
    /// Output directory.
    pub(super) output: &'a Storage,
}

impl CompletedJob<'_> {
    /// Returns the manifest. Fails if the output is missing, incomplete or from another job, if the
    /// input has changed, or if it cannot be compared.
    pub(super) async fn check(&self) -> Result<OutputManifest, Failure> {
        let url = self.output.url().trim_end_matches('/');
        let manifest = match read_manifest(self.output, self.uid).await {
            Ok(manifest) => manifest,
            Err(ManifestError::Missing) => {
                let what = format!("its output is missing: {url}/{MANIFEST} not found");
                return Err(self.refuse(&what));
            }
            Err(ManifestError::OtherJob { id, .. }) => {
                return Err(self.refuse(&format!("job {id} has replaced its output in {url}")));
            }
            Err(ManifestError::Damaged(error)) => {
                let what = format!("{url}/{MANIFEST} is damaged: {error}");
                // A new run refuses a directory with a damaged manifest, even with --fresh.
                let remedy = "restore the file, or delete it and use --fresh to run the job again";
                return Err(self.refuse_with(&what, remedy));
            }
            Err(ManifestError::Storage(error)) => return Err(error.into()),
        };
        self.check_parts(&manifest).await?;
        self.check_input(&manifest)?;
        Ok(manifest)
    }

    /// Compares the sizes of the output files with the manifest.
    async fn check_parts(&self, manifest: &OutputManifest) -> Result<(), Failure> {
        let url = self.output.url().trim_end_matches('/');
        let parts = manifest.parts.iter().map(|part| (part.name.as_str(), part.bytes));
        let errors = manifest.errors.iter().map(|errors| (errors.name.as_str(), errors.bytes));
        let files: Vec<(&str, u64)> = parts.chain(errors).collect();
        for (&(name, bytes), size) in files.iter().zip(self.sizes(&files).await?) {
            match size {
                Some(size) if size == bytes => {}
                Some(size) => {
                    let what = format!("{url}/{name} has {size} bytes instead of {bytes}");
                    return Err(self.refuse(&format!("its output has changed: {what}")));
                }
                None => {
                    let what = format!("its output is incomplete: {url}/{name} not found");
                    return Err(self.refuse(&what));
                }
            }
        }
        Ok(())
    }

    /// Returns the sizes of these output files; `None` for a missing file.
    ///
    /// Lists the bucket of a large output. Otherwise asks for each file, because there may be any
    /// number of other files, and directories that cannot be read.
    async fn sizes(&self, files: &[(&str, u64)]) -> Result<Vec<Option<u64>>, Failure> {
        let output = self.output;
        if output.folder().is_none() && files.len() >= LISTED_MIN {
            let listed: BTreeMap<String, u64> = output.list_sized("").await?.into_iter().collect();
            return Ok(files.iter().map(|(name, _)| listed.get(*name).copied()).collect());
        }
        let sizes = files.iter().map(|(name, _)| output.size(name));
        Ok(stream::iter(sizes).buffered(SIZES_MAX).try_collect().await?)
    }

    fn refuse(&self, what: &str) -> Failure {
        self.refuse_with(what, "use --fresh to run it again")
    }

    fn refuse_with(&self, what: &str, remedy: &str) -> Failure {
        Failure::Input(format!("job {} has completed, but {what}; {remedy}", self.id))
    }

    /// Compares local input files with the manifest. An input in a bucket is not checked: only the
    /// program needs access to it.
    fn check_input(&self, manifest: &OutputManifest) -> Result<(), Failure> {
        let url = self.input.url.as_str();
        let path = match url.strip_prefix("file://") {
            None if url.contains("://") => return Ok(()),
            path => path.unwrap_or(url),
        };
        let (folder, listed) = self.list_input(path).map_err(|error| self.unreadable(&error))?;
        if listed.is_empty() && !manifest.input.is_empty() {
            return Err(self.missing_input(path));
        }
        let is_missing = |file: &&InputFile| {
            listed.binary_search_by(|other| other.name.cmp(&file.name)).is_err()
        };
        let missing: Vec<&InputFile> = manifest.input.iter().filter(is_missing).collect();
        if let Some(first) = missing.first() {
            let (path, num) = (folder.join(&first.name), missing.len());
            let what = format!(
                "its input {url} has changed: {} not found (missing files: {num} of {})",
                path.display(),
                manifest.input.len()
            );
            let remedy = "restore the input, or use --fresh to run the job on the present input";
            return Err(self.refuse_with(&what, remedy));
        }
        let changed = |what: &str| self.refuse(&format!("its input {url} has changed: {what}"));
        let before: Vec<_> =
            manifest.input.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
        if let Some(difference) = first_difference(&before, &listed) {
            return Err(changed(&difference));
        }
        for file in &manifest.input {
            let path = folder.join(&file.name);
            let is_unchanged = is_unchanged(&path, &file.sha256);
            let failed =
                |error: io::Error| self.unreadable(&format!("{}: {error}", path.display()));
            if !is_unchanged.map_err(failed)? {
                return Err(changed(&format!("{} has other contents", file.name)));
            }
        }
        Ok(())
    }

    /// Returns the error for an input without any file. A new run would fail, so `--fresh` is no
    /// remedy.
    fn missing_input(&self, path: &str) -> Failure {
        let path = self.folder.join(Pattern::split(path).0);
        let why = match path.exists() {
            true => format!("no files found in {}", path.display()),
            false => format!("{} not found", path.display()),
        };
        Failure::Input(self.incomparable(&why, "restore the input"))
    }

    /// Returns the error for an input that cannot be read. A new run would fail as well.
    fn unreadable(&self, why: &str) -> Failure {
        Failure::System(self.incomparable(why, "correct this"))
    }

    /// Returns the message for an input that cannot be compared with the complete output.
    fn incomparable(&self, why: &str, remedy: &str) -> String {
        let (id, input) = (self.id, &self.input.url);
        let output = self.output.url().trim_end_matches('/');
        format!(
            "job {id} has completed, and its output in {output} is complete, but its input {input} \
             cannot be compared: {why}; {remedy} and repeat the command, or use the output as it is"
        )
    }

    /// Returns the directory of a local input, and its files in the order of a manifest.
    fn list_input(&self, path: &str) -> Result<(PathBuf, Vec<ListedFile>), String> {
        let (below, mut pattern) = Pattern::split(path);
        let mut folder = self.folder.join(below);
        if !folder.is_dir() {
            // The input is a file, or is missing.
            let name = folder.file_name().and_then(OsStr::to_str).unwrap_or_default();
            pattern.0.insert(0, name.to_owned());
            folder.pop();
        }
        let listed = list_local(&folder, &pattern, self.output.folder())?;
        Ok((folder, listed))
    }
}

/// Returns whether a file has the recorded contents.
fn is_unchanged(path: &Path, sha256: &str) -> io::Result<bool> {
    let (mut file, mut hasher) = (File::open(path)?, FileHasher::new(HashAlgorithm::Sha256));
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish().hex() == sha256),
            num => hasher.update(&buffer[..num]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;
    use stoker_storage::hash::sha256_hex;

    use super::*;

    const ROWS: &str = "x\n1\n";
    const UID: &str = "0b3f9c1e77aa";

    /// Completes a job with two input files whose output is below its input directory, applies
    /// `change` to the working directory, and checks the job.
    async fn rerun(url: &str, change: impl FnOnce(&Path)) -> Result<(), Failure> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path();
        let out = folder.join("in/out");
        fs::create_dir_all(&out).unwrap();
        let names = ["a.csv", "b.csv"];
        for name in names {
            fs::write(folder.join("in").join(name), ROWS).unwrap();
        }
        let sha256 = sha256_hex(ROWS.as_bytes());
        let file =
            |name: &str| json!({"name": name, "bytes": ROWS.len(), "rows": 1, "sha256": sha256});
        fs::write(out.join("part-0.jsonl"), "{}\n").unwrap();
        let manifest = json!({
            "format": 1, "job": "ja", "jobId": UID, "outputFormat": "jsonLines", "rows": 1,
            "inputRows": 2, "rejected": 1,
            "parts": [{"name": "part-0.jsonl", "bytes": 3, "sha256": "", "rows": 1, "file": 0,
                "firstRow": 0, "inputRows": 1}],
            "input": names.map(file),
        });
        fs::write(out.join(MANIFEST), manifest.to_string()).unwrap();
        change(folder);
        let input = InferenceInput { url: url.to_owned(), endpoint: None, format: None };
        let output = Storage::open(&out.display().to_string(), None).unwrap();
        let id = "ja-0b3f9c1e";
        let job = CompletedJob { id, uid: UID, folder, input: &input, output: &output };
        job.check().await.map(|_| ())
    }

    async fn check(change: impl FnOnce(&Path), expected: Result<(), &str>) {
        match (rerun("in", change).await, expected) {
            (Ok(()), Ok(())) => {}
            (Err(Failure::Input(error)), Err(expected)) => {
                assert!(error.contains(expected), "{error}");
                assert!(error.ends_with("; use --fresh to run it again"), "{error}");
            }
            (checked, expected) => panic!("{checked:?} is not {expected:?}"),
        }
    }

    fn write(path: &'static str, text: &'static str) -> impl FnOnce(&Path) {
        move |folder: &Path| fs::write(folder.join(path), text).unwrap()
    }

    #[tokio::test]
    async fn changed_input_is_refused() {
        check(|_| {}, Ok(())).await;
        check(write("in/.hidden.csv", "x\n"), Ok(())).await;
        let longer = "expected a.csv with 4 bytes, found a.csv with 6 bytes";
        check(write("in/a.csv", "x\n1\n2\n"), Err(longer)).await;
        check(write("in/a.csv", "x\n2\n"), Err("changed: a.csv has other contents")).await;
        check(write("in/c.csv", "x\n"), Err("expected nothing, found c.csv with 2 bytes")).await;
    }

    #[tokio::test]
    async fn missing_input_file_is_named_with_both_remedies() {
        let delete = |folder: &Path| fs::remove_file(folder.join("in/b.csv")).unwrap();
        let error = rerun("in", delete).await.unwrap_err();
        assert_eq!(error.code(), 2);
        let error = error.to_string();
        assert!(error.contains("/in/b.csv not found (missing files: 1 of 2); rest"), "{error}");
        assert!(error.ends_with("or use --fresh to run the job on the present input"), "{error}");
    }

    #[tokio::test]
    async fn input_that_cannot_be_compared_keeps_the_output() {
        let check = |result: Result<(), Failure>, code: u8, expected: &str| {
            let error = result.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            let error = error.to_string();
            assert!(error.contains("/in/out is complete, but its input "), "{error}");
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("--fresh"), "{error}");
        };
        let delete = |folder: &Path| {
            for name in ["in/a.csv", "in/b.csv"] {
                fs::remove_file(folder.join(name)).unwrap();
            }
        };
        check(rerun("in", delete).await, 2, "no files found in /");
        check(rerun("in/*.csv", delete).await, 2, "no files found in /");
        check(rerun("in/a.csv", delete).await, 2, "/in/a.csv not found; restore the input");
        check(rerun("gone/*.csv", |_| {}).await, 2, "/gone not found; restore the input");
        // A link to itself cannot be read, not even by root.
        let add_loop = |folder: &Path| {
            std::os::unix::fs::symlink("c.csv", folder.join("in/c.csv")).unwrap();
        };
        check(rerun("in", add_loop).await, 1, "/in/c.csv: ");
    }

    #[tokio::test]
    async fn only_files_of_the_output_are_read() {
        // A directory with a cycle of links cannot be listed, not even by root.
        let add_cycle = |folder: &Path| {
            std::os::unix::fs::symlink(".", folder.join("in/out/cycle")).unwrap();
        };
        check(add_cycle, Ok(())).await;
    }

    #[tokio::test]
    async fn many_parts_in_a_bucket_are_compared() {
        let output = Storage::open("memory://", None).unwrap();
        let name = |part: usize| format!("part-{part}.jsonl");
        let part = |part: usize| {
            json!({"name": name(part), "bytes": 3, "sha256": "", "rows": 1, "file": 0,
                "firstRow": 0, "inputRows": 1})
        };
        let manifest: OutputManifest = serde_json::from_value(json!({
            "format": 1, "job": "ja", "jobId": UID, "outputFormat": "jsonLines", "rows": 1,
            "inputRows": 1, "rejected": 0, "input": [],
            "parts": (0..LISTED_MIN).map(part).collect::<Vec<_>>(),
        }))
        .unwrap();
        for part in 0..LISTED_MIN {
            output.put(&name(part), "{}\n".into()).await.unwrap();
        }
        let input = InferenceInput { url: "in".to_owned(), endpoint: None, format: None };
        let (id, folder) = ("ja-0b3f9c1e", Path::new("/"));
        let job = CompletedJob { id, uid: UID, folder, input: &input, output: &output };
        job.check_parts(&manifest).await.unwrap();
        output.put(&name(7), "{}{}\n".into()).await.unwrap();
        let error = job.check_parts(&manifest).await.unwrap_err().to_string();
        assert!(error.contains("/part-7.jsonl has 5 bytes instead of 3"), "{error}");
        output.delete(&name(7)).await.unwrap();
        let error = job.check_parts(&manifest).await.unwrap_err().to_string();
        assert!(error.contains("/part-7.jsonl not found"), "{error}");
    }

    #[tokio::test]
    async fn missing_or_foreign_output_is_refused() {
        let delete = |name: &'static str| {
            move |folder: &Path| fs::remove_file(folder.join("in/out").join(name)).unwrap()
        };
        check(delete(MANIFEST), Err("its output is missing: ")).await;
        check(delete("part-0.jsonl"), Err("/in/out/part-0.jsonl not found")).await;
        let longer = write("in/out/part-0.jsonl", "{}{}\n");
        check(longer, Err("part-0.jsonl has 5 bytes instead of 3")).await;
        let replace = |folder: &Path| {
            let path = folder.join("in/out").join(MANIFEST);
            let text = fs::read_to_string(&path).unwrap();
            let text = text.replace(UID, "77aa0b3f9c1e").replace("\"ja\"", "\"jb\"");
            fs::write(path, text).unwrap();
        };
        check(replace, Err("but job jb-77aa0b3f has replaced its output in ")).await;
    }

    #[tokio::test]
    async fn damaged_manifest_is_named_with_its_remedy() {
        let damage = write("in/out/manifest.json", "{\"format\": 1");
        let error = rerun("in", damage).await.unwrap_err();
        assert_eq!(error.code(), 2);
        let error = error.to_string();
        assert!(error.contains("/in/out/manifest.json is damaged: EOF while parsing"), "{error}");
        assert!(error.ends_with("or delete it and use --fresh to run the job again"), "{error}");
    }
}
