//! Input of a job: local files or objects in a bucket, by path, directory or pattern.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use stoker_api::inference::{InferenceInput, InferenceTask, RowFormat, STATE_FOLDER};
use stoker_api::names::MANIFEST;
use stoker_storage::input::{JobOutput, ListedFile, NOT_UTF8, Pattern, follow_manifests};
use stoker_storage::{Storage, StorageError};
use tokio::runtime::Handle;
use url::Url;

use super::infrastructure;
use super::output_folder::OutputFolder;
use crate::{InvalidInput, Result};

/// Size of the range requests when scanning an object, in bytes.
const CHUNK_BYTES: u64 = 8 << 20;

/// Input files of a job.
#[derive(Debug)]
pub(super) struct Source {
    location: Location,
    pattern: Pattern,
    /// Path of the job's output directory relative to the input directory, if it is below; excluded
    /// from the input. Empty if both are the same directory.
    output_subfolder: Option<String>,
    /// Path of the job's output directory, if it is local.
    output_folder: Option<PathBuf>,
    input: InferenceInput,
}

#[derive(Clone, Debug)]
enum Location {
    /// Local directory. If the input is a file, the directory that contains it.
    Local(PathBuf),
    /// Directory below the root of the storage.
    Remote { storage: Storage, folder: String, rt: Handle },
}

impl Source {
    /// Returns whether the input consists of local files.
    pub(super) fn is_local(&self) -> bool {
        match &self.location {
            Location::Local(_) => true,
            Location::Remote { storage, .. } => storage.folder().is_some(),
        }
    }

    /// Opens the input of a job.
    ///
    /// # Errors
    ///
    /// Fails if the address is invalid or the storage cannot be opened.
    pub(super) fn open(input: &InferenceInput, rt: &Handle) -> Result<Self> {
        let url = input.url.as_str();
        let refuse = |why: String| InvalidInput(format!("input {url}: {why}"));
        let (root, path) = match Url::parse(url) {
            Ok(parsed) if parsed.scheme() == "file" => {
                // Do not use the URL's parsed path, because `?` is part of a pattern here.
                let path = url.trim_start_matches("file://");
                (None, path.to_owned())
            }
            Ok(parsed) if url.contains("://") => {
                let bucket = parsed.host_str().unwrap_or_default();
                let root = format!("{}://{bucket}", parsed.scheme());
                let path = url.get(root.len()..).unwrap_or_default();
                (Some(root), path.trim_matches('/').to_owned())
            }
            _ => (None, url.to_owned()),
        };
        let (folder, mut pattern) = Pattern::split(&path);
        let location = match root {
            Some(root) => {
                let storage = Storage::open(&root, input.endpoint.as_deref())?;
                let mut folder = folder;
                if pattern.0.is_empty()
                    && !folder.is_empty()
                    && rt.block_on(storage.exists(&folder))?
                {
                    let (parent, name) = folder.rsplit_once('/').unwrap_or(("", &folder));
                    pattern = Pattern(vec![name.to_owned()]);
                    folder = parent.to_owned();
                }
                Location::Remote { storage, folder, rt: rt.clone() }
            }
            None => {
                let folder = std::path::absolute(if folder.is_empty() { "." } else { &folder })?;
                match fs::metadata(&folder) {
                    Ok(metadata) if metadata.is_dir() => Location::Local(folder),
                    Ok(_) => {
                        let name = folder.file_name().unwrap_or_default();
                        let name = name.to_str().ok_or_else(|| refuse(NOT_UTF8.into()))?;
                        pattern.0.insert(0, name.to_owned());
                        Location::Local(folder.parent().unwrap_or(Path::new("/")).to_owned())
                    }
                    Err(error) => {
                        // The full path shows where a relative one begins.
                        let place = match folder.to_str() == Some(path.as_str()) {
                            true => String::new(),
                            false => format!("{}: ", folder.display()),
                        };
                        return Err(refuse(format!("{place}{error}; check the path")).into());
                    }
                }
            }
        };
        Ok(Self {
            location,
            pattern,
            output_subfolder: None,
            output_folder: None,
            input: input.clone(),
        })
    }

    /// Excludes the job's own output, if it is below the input's directory.
    ///
    /// # Errors
    ///
    /// Fails if output files would match the input's pattern.
    pub(super) fn excluding_output(
        self,
        output: &OutputFolder,
        task: &InferenceTask,
    ) -> Result<Self> {
        let output_subfolder = match &self.location {
            Location::Local(folder) => {
                let folder = folder.canonicalize()?;
                let output_subfolder =
                    output.storage.folder().map(Path::canonicalize).transpose()?;
                output_subfolder
                    .as_ref()
                    .and_then(|output_subfolder| {
                        output_subfolder.strip_prefix(&folder).ok()?.to_str()
                    })
                    .map(str::to_owned)
            }
            Location::Remote { storage, folder, .. } => {
                let (folder, output_subfolder) =
                    (join(storage.url(), folder), output.storage.url());
                let below = output_subfolder
                    .trim_end_matches('/')
                    .strip_prefix(folder.trim_end_matches('/'));
                let below = below.filter(|path| path.is_empty() || path.starts_with('/'));
                below
                    .filter(|_| task.input.endpoint == task.output.endpoint)
                    .map(|path| path.trim_start_matches('/').to_owned())
            }
        };
        let output_folder = output.storage.folder().map(Path::to_owned);
        let source = Self { output_subfolder, output_folder, ..self };
        let names = output.own_names(task.output.format);
        let is_input = |name: &&String| source.is_in_output(name) && source.pattern.is_match(name);
        match names.iter().find(is_input) {
            Some(name) => Err(source.output_overlap(name)),
            None => Ok(source),
        }
    }

    /// Returns `true` if input and output share a directory and the path is directly in it.
    fn is_in_output(&self, path: &str) -> bool {
        self.output_subfolder.as_deref() == Some("") && !path.contains('/')
    }

    fn output_overlap(&self, name: &str) -> crate::Error {
        let why = format!(
            "input.url {} is in the directory of output.url, so {name} would be input and output; \
             use another directory for the output, for example one below the input's directory, \
             which is excluded from the input",
            self.input.url
        );
        InvalidInput(why).into()
    }

    /// Returns the files, sorted by name, and their common format.
    ///
    /// # Errors
    ///
    /// Fails if there are no files, or if their format cannot be determined.
    pub(super) fn list(&self) -> Result<(Vec<ListedFile>, RowFormat)> {
        let refuse = |why: String| InvalidInput(format!("input {}: {why}", self.input.url));
        let mut all = vec![];
        match &self.location {
            Location::Local(folder) => {
                all = self
                    .pattern
                    .list_files(folder, self.output_folder.as_deref())
                    .map_err(refuse)?;
            }
            Location::Remote { storage, folder, rt } => {
                let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
                let output_subfolder =
                    self.output_subfolder.as_ref().filter(|path| !path.is_empty());
                let output_subfolder = output_subfolder.map(|path| format!("{path}/"));
                for (path, bytes) in rt.block_on(storage.list_sized(folder))? {
                    let Some(name) = path.strip_prefix(&prefix) else { continue };
                    let is_output = output_subfolder
                        .as_ref()
                        .is_some_and(|output_subfolder| name.starts_with(output_subfolder));
                    // An entry of 0 bytes may be a directory marker of the store, or an empty file.
                    if !is_output
                        && self.pattern.is_match(name)
                        && (bytes > 0 || rt.block_on(storage.exists(&path))?)
                    {
                        all.push(ListedFile { name: name.to_owned(), bytes });
                    }
                }
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let is_part = |name: &str| name.starts_with("part-") && self.is_in_output(name);
        if let Some(file) = all.iter().find(|file| is_part(&file.name)) {
            return Err(self.output_overlap(&file.name));
        }
        let all = follow_manifests(all, &self.pattern, |below| self.job_output(below))
            .map_err(|error| error.into_error(refuse))?;
        if all.is_empty() {
            return Err(refuse("file not found; check the path or the pattern".into()).into());
        }
        if let Some(format) = self.input.format {
            return Ok((all, format));
        }
        let mut formats = all.iter().map(|file| RowFormat::of_name(&file.name));
        let first = formats.next().flatten();
        if let (Some(format), None) = (first, formats.find(|format| *format != first)) {
            return Ok((all, format));
        }
        let unlike = all.iter().find(|file| {
            let format = RowFormat::of_name(&file.name);
            format.is_none() || format != first
        });
        let unlike = unlike.map_or("", |file| &file.name);
        Err(refuse(format!(
            "{unlike} does not have the same known format as the other files; set input.format to \
             jsonLines, csv, parquet or arrow, or narrow the pattern"
        ))
        .into())
    }

    /// Returns the output of another job in a directory below that of the input.
    fn job_output(&self, below: &str) -> Result<JobOutput, ListError> {
        match &self.location {
            Location::Local(folder) => {
                let folder = folder.join(below);
                let failed = |error| format!("{}: {error}", folder.display());
                Ok(JobOutput::in_local(&folder).map_err(failed)?)
            }
            Location::Remote { storage, folder, rt } => {
                let folder = join(folder, below);
                let folder = folder.trim_end_matches('/');
                let manifest = match rt.block_on(storage.get(&join(folder, MANIFEST))) {
                    Err(StorageError::NotFound { .. }) => None,
                    manifest => Some(manifest?),
                };
                let has_state = manifest.is_none()
                    && !rt.block_on(storage.folders(&join(folder, STATE_FOLDER)))?.is_empty();
                Ok(JobOutput::new(manifest.as_deref(), has_state))
            }
        }
    }

    /// Returns a future that reads bytes `start..end` of a file.
    ///
    /// # Errors
    ///
    /// The future fails if the file is missing, shorter, or cannot be read.
    pub(super) fn read(
        &self,
        name: &str,
        start: u64,
        end: u64,
    ) -> impl Future<Output = Result<Bytes>> + Send + use<> {
        let (location, name) = (self.location.clone(), name.to_owned());
        async move {
            let changed = |why: String| {
                InvalidInput(format!("input {name} has changed since the job began: {why}"))
            };
            match location {
                Location::Local(folder) => {
                    let path = folder.join(&name);
                    let read = tokio::task::spawn_blocking(move || read_file(&path, start, end));
                    let read = read.await.map_err(io::Error::other).flatten();
                    read.map_err(|error| match error.kind() {
                        io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => {
                            changed(error.to_string()).into()
                        }
                        _ => infrastructure(format!("cannot read input {name}: {error}")),
                    })
                }
                Location::Remote { storage, folder, .. } => {
                    let read = storage.get_range(&join(&folder, &name), start..end).await;
                    read.map_err(|error| match error {
                        StorageError::NotFound { .. } => changed(error.to_string()).into(),
                        error => error.into(),
                    })
                }
            }
        }
    }

    /// Returns a reader for a complete file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be opened.
    pub(super) fn stream(&self, file: &ListedFile) -> Result<Box<dyn Read + '_>> {
        match &self.location {
            Location::Local(folder) => {
                let opened = File::open(folder.join(&file.name));
                Ok(Box::new(opened.map_err(|error| {
                    infrastructure(format!("cannot read input {}: {error}", file.name))
                })?))
            }
            Location::Remote { storage, folder, rt } => {
                let path = join(folder, &file.name);
                Ok(Box::new(ObjectReader {
                    storage,
                    path,
                    rt,
                    at: 0,
                    end: file.bytes,
                    buffered: Bytes::new(),
                }))
            }
        }
    }
}

fn read_file(path: &Path, start: u64, end: u64) -> io::Result<Bytes> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
    file.read_exact(&mut bytes)?;
    Ok(bytes.into())
}

/// Failure to list input files.
enum ListError {
    /// The input is invalid.
    Invalid(String),
    Storage(StorageError),
}

impl From<String> for ListError {
    fn from(why: String) -> Self {
        Self::Invalid(why)
    }
}

impl From<StorageError> for ListError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl ListError {
    fn into_error(self, refuse: impl FnOnce(String) -> InvalidInput) -> crate::Error {
        match self {
            Self::Invalid(why) => refuse(why).into(),
            Self::Storage(error) => error.into(),
        }
    }
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

/// Reader for an object, with one range request per chunk.
struct ObjectReader<'a> {
    storage: &'a Storage,
    path: String,
    rt: &'a Handle,
    at: u64,
    end: u64,
    buffered: Bytes,
}

impl Read for ObjectReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.buffered.is_empty() && self.at < self.end {
            let end = self.end.min(self.at + CHUNK_BYTES);
            let range = self.storage.get_range(&self.path, self.at..end);
            self.buffered = self.rt.block_on(range).map_err(io::Error::other)?;
            self.at = end;
        }
        let num = buffer.len().min(self.buffered.len());
        buffer[..num].copy_from_slice(&self.buffered.split_to(num));
        Ok(num)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_listed(url: &str, format: Option<RowFormat>, expected: Result<&[&str], &str>) {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "b.csv",
            "a.csv",
            "deep/c.csv",
            "deep/d.jsonl",
            ".hidden.csv",
            "_stoker/x.csv",
            "notes",
        ] {
            let path = folder.path().join("in").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        let rt = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let url = format!("{}/in{url}", folder.path().display());
        let input = InferenceInput { url, endpoint: None, format };
        let listed = Source::open(&input, rt.handle()).and_then(|source| source.list());
        match (listed, expected) {
            (Ok((listed, _)), Ok(expected)) => {
                let names: Vec<_> = listed.iter().map(|file| file.name.as_str()).collect();
                assert_eq!(names, expected);
            }
            (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (listed, expected) => panic!("{listed:?} is not {expected:?}"),
        }
    }

    #[test]
    fn input_is_a_file_directory_or_pattern() {
        let csv = Some(RowFormat::Csv);
        check_listed("/a.csv", None, Ok(&["a.csv"]));
        check_listed("/notes", None, Err("set input.format"));
        check_listed("/notes", csv, Ok(&["notes"]));
        check_listed("/*.csv", None, Ok(&["a.csv", "b.csv"]));
        check_listed("/deep/*.csv", None, Ok(&["c.csv"]));
        check_listed("/d*p/?.csv", None, Ok(&["deep/c.csv"]));
        check_listed("", csv, Ok(&["a.csv", "b.csv", "deep/c.csv", "deep/d.jsonl", "notes"]));
        check_listed("", None, Err("does not have the same known format"));
        check_listed("/deep", None, Err("d.jsonl does not have the same known format"));
        check_listed("/*.tsv", None, Err("file not found"));
        check_listed("/nothing.csv", None, Err("nothing.csv"));
        check_listed("/.hidden.csv", None, Ok(&[".hidden.csv"]));
    }

    /// The rules are tested beside [`follow_manifests`].
    #[test]
    fn outputs_in_buckets_are_read_by_their_manifest() {
        let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let storage = Storage::open("memory://", None).unwrap();
        let [part, late] =
            [2, 1].map(|attempt| format!("part-00000-of-00001-0b3f9c1e-{attempt}.csv"));
        let put = |path: &str, text: String| {
            rt.block_on(storage.put(&format!("in/{path}"), text.into())).unwrap();
        };
        put(&part, "x".to_owned());
        put(&late, "x".to_owned());
        put("_stoker/0b3f9c1e/plan.json", "{}".to_owned());
        let list = || {
            let location = Location::Remote {
                storage: storage.clone(),
                folder: "in".to_owned(),
                rt: rt.handle().clone(),
            };
            let input =
                InferenceInput { url: "s3://b/in".to_owned(), endpoint: None, format: None };
            let (output_subfolder, output_folder) = (None, None);
            let pattern = Pattern(vec![]);
            Source { location, pattern, output_subfolder, output_folder, input }.list()
        };
        let error = list().unwrap_err().to_string();
        let expected = "input s3://b/in: the directory is the output of a job that has not";
        assert!(error.starts_with(expected), "{error}");
        let manifest = serde_json::json!({
            "format": 1, "job": "species", "jobId": "0b3f9c1e", "input": [], "outputFormat": "csv",
            "rows": 1, "inputRows": 1, "rejected": 0,
            "parts": [{
                "name": part, "bytes": 1, "sha256": "", "rows": 1, "file": 0, "firstRow": 0,
                "inputRows": 1,
            }],
        });
        put(MANIFEST, manifest.to_string());
        let (listed, format) = list().unwrap();
        let names: Vec<_> = listed.into_iter().map(|file| file.name).collect();
        assert_eq!((names, format), (vec![part.clone()], RowFormat::Csv));
    }

    #[test]
    fn missing_absolute_path_is_named_once() {
        let rt = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let error = |url: &str| {
            let input = InferenceInput { url: url.to_owned(), endpoint: None, format: None };
            Source::open(&input, rt.handle()).unwrap_err().to_string()
        };
        let expected = "input /no/such.csv: No such file or directory (os error 2); check the path";
        assert_eq!(error("/no/such.csv"), expected);
        let relative = error("no/such.csv");
        let current = std::env::current_dir().unwrap();
        let full = format!("input no/such.csv: {}: ", current.join("no/such.csv").display());
        assert!(relative.starts_with(&full), "{relative}");
    }
}
