//! Weight files for other programs, with the names and layout of burn or PyTorch.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use safetensors::{Dtype, View};

use super::weights_reader::{self, StoredTensor};
use super::{Entry, HostTensor, pack, to_burn_bytes};
use crate::Result;

/// A file of weights in the safetensors format.
///
/// With the feature `pytorch`, [`import`](Self::import) also reads files written by `torch.save`
/// with a `state_dict` or a whole model. They are detected by their first bytes and always use
/// PyTorch's names and shapes. Code in them is never executed.
///
/// ```no_run
/// # fn main() -> stoker_trainer::Result<()> {
/// use stoker_trainer::WeightsFile;
/// use stoker_trainer::burn::nn::LinearConfig;
/// use stoker_trainer::burn::tensor::Device;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// WeightsFile::new("model.safetensors").pytorch().export(&model)?;
/// let model = WeightsFile::new("model.safetensors").pytorch().import(model)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsFile {
    path: PathBuf,
    is_pytorch: bool,
    key: Option<String>,
}

impl WeightsFile {
    /// Creates a weight file with burn's names and shapes. Names are field paths of the model, such
    /// as `hidden.weight`; the weight of a `Linear` has shape `[inputs, outputs]`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), is_pytorch: false, key: None }
    }

    /// Uses the names and shapes of a PyTorch `state_dict` whose modules have the same names. The
    /// weight of a `Linear` has shape `[outputs, inputs]`; norms have `weight` and `bias`.
    /// Recurrent layers are not converted, because PyTorch orders their gates differently.
    #[must_use]
    pub fn pytorch(self) -> Self {
        Self { is_pytorch: true, ..self }
    }

    /// Sets the key of the weights in a file of `torch.save` that contains more than weights. For
    /// example, `model` for `torch.save({"epoch": 3, "model": model.state_dict()}, PATH)`.
    #[must_use]
    pub fn key(self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// Writes all parameters and buffers of a model.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be written, or if safetensors does not support the type of a
    /// tensor.
    pub fn export<M: Module>(&self, model: &M) -> Result<()> {
        let mut tensors = vec![];
        for tensor in model_tensors(model) {
            let (bytes, shape, dtype) = (tensor.read)().into_parts();
            let (name, is_transposed) = self.name(&tensor.path, &tensor.container, shape.len());
            let (mut shape, mut bytes) = (shape.to_vec(), bytes.to_vec());
            if is_transposed {
                bytes = transposed(&bytes, shape[0], shape[1]);
                shape.swap(0, 1);
            }
            let dtype = to_safetensors_dtype(dtype).ok_or_else(|| {
                format!("cannot export {name}: safetensors does not support {dtype:?}")
            })?;
            tensors.push((name, OutputTensor { dtype, shape, bytes }));
        }
        safetensors::serialize_to_file(tensors, None, &self.path)
            .map_err(|error| self.file_error(&error))
    }

    /// Loads the weights into `fresh`, a model of the same structure. Values are converted to the
    /// model's types.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, lacks a tensor of the model, contains others, or has a
    /// tensor with another shape.
    pub fn import<M: Module>(&self, fresh: M) -> Result<M> {
        let is_torch_save = self.is_torch_save().map_err(|error| self.file_error(&error))?;
        let read = match is_torch_save {
            true => weights_reader::torch(&self.path, self.key.as_deref()),
            false if self.key.is_some() => {
                Err("a key requires a file of torch.save; remove `key`".into())
            }
            false => std::fs::read(&self.path)
                .map_err(crate::Error::from)
                .and_then(|bytes| weights_reader::safetensors(&bytes)),
        };
        let mut file = read.map_err(|error| self.file_error(&error))?;
        let named = Self { is_pytorch: self.is_pytorch || is_torch_save, ..self.clone() };
        // PyTorch counts the batches of a norm with running statistics; burn has no such field.
        file.retain(|name, _| !(named.is_pytorch && name.ends_with("num_batches_tracked")));
        let (mut entries, mut missing) = (vec![], vec![]);
        for tensor in model_tensors(&fresh) {
            let (name, is_transposed) =
                named.name(&tensor.path, &tensor.container, tensor.shape.len());
            let Some(StoredTensor { shape, dtype, read }) = file.remove(&name) else {
                missing.push(name);
                continue;
            };
            let mut expected = tensor.shape.clone();
            if is_transposed {
                expected.swap(0, 1);
            }
            if shape != expected {
                let path = self.path.display();
                return Err(format!(
                    "{path}: {name} has shape {shape:?}, but the model requires {expected:?}"
                )
                .into());
            }
            let dtype = dtype.map_err(|dtype| {
                format!("{}: {name} has unsupported type {dtype}", self.path.display())
            })?;
            let bytes = read().map_err(|error| self.file_error(&error))?;
            let bytes = match is_transposed {
                true => transposed(&bytes, expected[0], expected[1]),
                false => bytes,
            };
            let data =
                TensorData::from_bytes_vec(bytes, tensor.shape, dtype).convert_dtype(tensor.dtype);
            let HostTensor { bytes, shape, dtype } = data.into();
            let (name, id) = (tensor.path.join("."), Some(tensor.id.val()));
            entries.push(Entry { name, dtype, shape, id, bytes });
        }
        let unexpected: Vec<String> = file.into_keys().collect();
        if !missing.is_empty() || !unexpected.is_empty() {
            let list = |names: Vec<String>| match names.len() {
                0 => "nothing".to_owned(),
                _ => names.join(", "),
            };
            let (missing, unexpected) = (list(missing), list(unexpected));
            let path = self.path.display();
            return Err(format!(
                "{path} does not match the model: missing {missing}; unexpected {unexpected}"
            )
            .into());
        }
        let packed = pack(entries, &BTreeMap::new(), BTreeMap::new())?.into_bytes();
        let record = ModuleRecord::from_bytes(to_burn_bytes(&packed))?;
        // Apply BatchNorm's pending update first; otherwise it would be added to the loaded
        // statistics.
        let _ = fresh.valid();
        Ok(fresh.try_load_record(record).map_err(|error| {
            format!("{}: cannot load the weights into this model: {error}", self.path.display())
        })?)
    }

    /// Returns the name in the file, and whether the matrix is transposed there.
    fn name(&self, path: &[String], container: &str, rank: usize) -> (String, bool) {
        let own = path.join(".");
        if !self.is_pytorch {
            return (own, false);
        }
        let Some((field, parents)) = path.split_last() else { return (own, false) };
        let is_norm = container.ends_with("Norm");
        let field = match field.as_str() {
            "gamma" if is_norm => "weight",
            "beta" if is_norm => "bias",
            field => field,
        };
        let is_transposed = container == "Struct:Linear" && field == "weight" && rank == 2;
        ([parents, &[field.to_owned()]].concat().join("."), is_transposed)
    }

    /// Returns `true` for a file of torch.save. Reads only the first bytes.
    fn is_torch_save(&self) -> std::io::Result<bool> {
        let file = File::open(&self.path)?;
        let size = file.metadata()?.len();
        let mut head = vec![];
        file.take(weights_reader::FORMAT_BYTES as u64).read_to_end(&mut head)?;
        Ok(weights_reader::is_torch_save(&head, size))
    }

    fn file_error(&self, error: &dyn std::fmt::Display) -> crate::Error {
        format!("{}: {error}", self.path.display()).into()
    }
}

impl From<&Path> for WeightsFile {
    fn from(path: &Path) -> Self {
        Self::new(path)
    }
}

/// A tensor of a model.
struct ModelTensor {
    path: Vec<String>,
    /// Type of the containing module in burn's notation, such as `Struct:Linear`.
    container: String,
    id: ParamId,
    shape: Vec<usize>,
    dtype: DType,
    read: Box<dyn FnOnce() -> TensorData>,
}

/// Returns all tensors of a model, in the order of its fields.
fn model_tensors<M: Module>(model: &M) -> Vec<ModelTensor> {
    #[derive(Default)]
    struct Walk {
        path: Vec<String>,
        containers: Vec<String>,
        model_tensors: Vec<ModelTensor>,
    }
    impl Walk {
        fn add(
            &mut self,
            id: ParamId,
            shape: &Shape,
            dtype: DType,
            read: impl FnOnce() -> TensorData + 'static,
        ) {
            let (path, read) = (self.path.clone(), Box::new(read));
            let container = self.containers.last().cloned().unwrap_or_default();
            self.model_tensors.push(ModelTensor {
                path,
                container,
                id,
                shape: shape.to_vec(),
                dtype,
                read,
            });
        }
    }
    impl ModuleVisitor for Walk {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.push(name.into());
            self.containers.push(container_type.into());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
            self.containers.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            let tensor = param.transform_for_save().val();
            self.add(param.id, &tensor.shape(), tensor.dtype(), || tensor.into_data());
        }
    }
    // Apply BatchNorm's pending update, in place.
    let _ = model.valid();
    let mut walk = Walk::default();
    model.visit(&mut walk);
    walk.model_tensors
}

/// Transposes a matrix.
fn transposed(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    if bytes.is_empty() {
        return vec![];
    }
    let width = bytes.len() / (rows * columns);
    let element = |row: usize, column: usize| {
        let at = (row * columns + column) * width;
        &bytes[at..at + width]
    };
    (0..columns)
        .flat_map(|column| (0..rows).flat_map(move |row| element(row, column)))
        .copied()
        .collect()
}

/// A tensor to be written.
struct OutputTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for OutputTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

const DTYPES: [(DType, Dtype); 8] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::U8, Dtype::U8),
    (DType::Bool(burn::tensor::BoolStore::Native), Dtype::BOOL),
];

fn to_safetensors_dtype(dtype: DType) -> Option<Dtype> {
    DTYPES.iter().find(|(burn, _)| *burn == dtype).map(|(_, safetensors)| *safetensors)
}

pub(super) fn from_safetensors_dtype(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, safetensors)| *safetensors == dtype).map(|(burn, _)| *burn)
}

#[cfg(test)]
mod tests {
    use burn::nn::conv::{Conv2d, Conv2dConfig};
    use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    use burn::tensor::Device;
    use safetensors::SafeTensors;

    use super::*;

    #[derive(Module, Debug)]
    struct Net {
        conv: Conv2d,
        norm: BatchNorm,
        output: Linear,
    }

    /// Initializes a model's weights while no other test uses the random stream.
    fn initialized<M: Module>(model: M) -> M {
        let _stream = crate::train::tests::lock_random_stream();
        crate::record::initialize(model)
    }

    fn net() -> Net {
        let device = Device::flex().autodiff();
        initialized(Net {
            conv: Conv2dConfig::new([1, 2], [3, 3]).init(&device),
            norm: BatchNormConfig::new(2).init(&device),
            output: LinearConfig::new(2, 3).init(&device),
        })
    }

    fn numbers(net: &Net) -> Vec<(Vec<String>, Vec<f32>)> {
        let values =
            |tensor: ModelTensor| (tensor.path, (tensor.read)().try_to_vec::<f32>().unwrap());
        model_tensors(net).into_iter().map(values).collect()
    }

    #[test]
    fn safetensors_header_may_resemble_a_pickle() {
        let folder = tempfile::tempdir().unwrap();
        let file = WeightsFile::new(folder.path().join("x.safetensors"));
        let linear = || initialized(LinearConfig::new(784, 10).init(&Device::flex()));
        let (first, second): (Linear, Linear) = (linear(), linear());
        file.export(&first).unwrap();
        assert_eq!(std::fs::read(&file.path).unwrap()[..9], *b"\x80\0\0\0\0\0\0\0{");
        let read = file.import(second).unwrap();
        assert_eq!(read.weight.val().into_data(), first.weight.val().into_data());
    }

    #[test]
    fn weights_round_trip_in_both_layouts() {
        let folder = tempfile::tempdir().unwrap();
        for is_pytorch in [false, true] {
            let (first, second) = (net(), net());
            assert_ne!(numbers(&first), numbers(&second));
            let path = folder.path().join("x.safetensors");
            let file = WeightsFile { is_pytorch, ..WeightsFile::new(path) };
            file.export(&first).unwrap();
            let bytes = std::fs::read(&file.path).unwrap();
            let read = SafeTensors::deserialize(&bytes).unwrap();
            let shape = read.tensor("output.weight").unwrap().shape().to_vec();
            assert_eq!(shape, if is_pytorch { [3, 2] } else { [2, 3] });
            assert_eq!(read.names().contains(&"norm.gamma"), !is_pytorch);
            assert_eq!(numbers(&file.import(second).unwrap()), numbers(&first));
        }
    }

    #[test]
    fn matrices_are_transposed() {
        assert_eq!(
            transposed(&[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], 2, 3),
            [1, 1, 4, 4, 2, 2, 5, 5, 3, 3, 6, 6]
        );
    }

    #[test]
    fn mismatched_model_is_refused_with_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let device = Device::flex();
        let linear = |inputs| initialized(LinearConfig::new(inputs, 3).init(&device));
        WeightsFile::new(&path).export(&linear(2)).unwrap();
        let refused = |error: crate::Error| error.to_string().replace(path.to_str().unwrap(), "F");
        let error = refused(WeightsFile::new(&path).import(linear(4)).unwrap_err());
        assert_eq!(error, "F: weight has shape [2, 3], but the model requires [4, 3]");
        let error = refused(WeightsFile::new(&path).import(net()).unwrap_err());
        assert!(error.contains("missing conv.weight, conv.bias, norm.gamma"), "{error}");
        assert!(error.ends_with("unexpected bias, weight"), "{error}");
        let error = refused(WeightsFile::new(path.with_extension("y")).import(net()).unwrap_err());
        assert!(error.contains("No such file"), "{error}");
    }

    /// Returns a file written by PyTorch 2.15: element `i` of the n-th tensor is `n + i / 4`.
    fn torch_file(name: &str) -> WeightsFile {
        WeightsFile::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/").to_owned() + name)
    }

    #[cfg(feature = "pytorch")]
    #[test]
    fn both_forms_of_torch_save_are_read() {
        for file in [torch_file("net.pt"), torch_file("net-in-legacy.pt").key("model")] {
            let read = numbers(&file.import(net()).unwrap());
            let quarters =
                |first: f32, of: &[usize]| of.iter().map(|i| first + *i as f32 / 4.0).collect();
            let all = |num: usize| (0..num).collect::<Vec<_>>();
            let expected: Vec<(&str, Vec<f32>)> = vec![
                ("conv.weight", quarters(0.0, &all(18))),
                ("conv.bias", quarters(1.0, &all(2))),
                ("norm.gamma", quarters(2.0, &all(2))),
                ("norm.beta", quarters(3.0, &all(2))),
                ("norm.running_mean", quarters(4.0, &all(2))),
                ("norm.running_var", quarters(5.0, &all(2))),
                // Transposed in the file.
                ("output.weight", quarters(7.0, &[0, 2, 4, 1, 3, 5])),
                ("output.bias", quarters(8.0, &all(3))),
            ];
            let read: Vec<_> =
                read.iter().map(|(path, values)| (path.join("."), values.clone())).collect();
            let expected: Vec<_> =
                expected.into_iter().map(|(path, values)| (path.to_owned(), values)).collect();
            assert_eq!(read, expected);
        }
        let error = torch_file("net.pt").key("modle").import(net()).unwrap_err().to_string();
        assert!(error.contains("net.pt: ") && error.contains("modle"), "{error}");
    }

    #[cfg(not(feature = "pytorch"))]
    #[test]
    fn torch_save_is_refused_without_the_feature() {
        for name in ["net.pt", "net-in-legacy.pt"] {
            let error = torch_file(name).import(net()).unwrap_err().to_string();
            assert!(
                error.contains("the feature `pytorch`") && error.contains("save_file"),
                "{error}"
            );
        }
    }

    #[test]
    fn keys_require_files_of_torch_save() {
        let folder = tempfile::tempdir().unwrap();
        let file = WeightsFile::new(folder.path().join("x.safetensors"));
        file.export(&net()).unwrap();
        let error = file.key("model").import(net()).unwrap_err().to_string();
        assert!(error.ends_with("a key requires a file of torch.save; remove `key`"), "{error}");
    }
}
