//! The models to benchmark; `torch_steps.py` and `jax_steps.py` contain the same models.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use stoker_kernels::{
    Activation, AttentionMask, Conv2dExt, EmbeddingExt, LayerNormExt, LinearExt,
    OptimizerConfigExt, TransformerEncoderExt,
};
use stoker_trainer::Rows;

/// Learning rate of all models on all sides.
pub(crate) const LEARNING_RATE: f64 = 0.01;

/// Returns SGD with momentum 0.9. The dampening is 0 as in PyTorch, unlike burn's default.
pub(crate) fn optimizer() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0);
    SgdConfig::new().with_momentum(Some(momentum)).init_fused()
}

/// Inputs, and labels `[samples, positions]`. A text has one position per token, an image one.
pub(crate) type Batch<S> = (<S as Subject>::Input, Tensor<2, Int>);

/// A model to benchmark, with data of matching shapes.
pub(crate) trait Subject: Module + 'static {
    /// Inputs of several samples in one tensor.
    type Input: Rows<Batch = Self::Input> + Clone + Send + Sync + 'static;

    /// Number of samples in a batch.
    const BATCH: usize;

    /// Creates the model with random weights.
    fn new(device: &Device) -> Self;

    /// Returns `samples` random samples on the device.
    fn data(samples: usize, device: &Device) -> Batch<Self>;

    /// Returns the inputs in another data type, if they are not integers.
    fn cast(inputs: Self::Input, dtype: DType) -> Self::Input;

    /// Returns the number of floating-point operations in the matrix products of a training step on
    /// one batch.
    ///
    /// The forward pass of a linear layer or convolution has two for each weight and position. The
    /// gradient of the weights needs the same number, and so does that of the inputs. A layer that
    /// reads the data needs no gradient of inputs.
    fn flops() -> f64;

    /// Returns the logits of a batch.
    ///
    /// # Shapes
    ///
    /// - result: `[samples * positions, classes]`
    fn logits(&self, inputs: Self::Input) -> Tensor<2>;
}

/// Multilayer perceptron with 784 inputs, layers of 512 and 256, and 10 classes, in batches of 128.
#[derive(Debug, Module)]
pub(crate) struct Mlp {
    first: Linear,
    second: Linear,
    output: Linear,
}

impl Subject for Mlp {
    type Input = Tensor<2>;

    const BATCH: usize = 128;

    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(784, 512).init(device),
            second: LinearConfig::new(512, 256).init(device),
            output: LinearConfig::new(256, 10).init(device),
        }
    }

    fn data(samples: usize, device: &Device) -> Batch<Self> {
        (normal([samples, 784], device), classes([samples, 1], 10, device))
    }

    fn cast(inputs: Tensor<2>, dtype: DType) -> Tensor<2> {
        inputs.cast(dtype)
    }

    fn flops() -> f64 {
        let (first, others) = (784 * 512, 512 * 256 + 256 * 10);
        (2 * Self::BATCH * (2 * first + 3 * others)) as f64
    }

    fn logits(&self, inputs: Tensor<2>) -> Tensor<2> {
        let hidden = self.first.forward_fused(inputs, Activation::Relu);
        let hidden = self.second.forward_fused(hidden, Activation::Relu);
        self.output.forward_fused(hidden, Activation::Identity)
    }
}

/// Convolutional network on images of 28 x 28, in batches of 64. It has two convolutions with 16
/// and 32 filters, a hidden layer of 128, and 10 classes.
#[derive(Debug, Module)]
pub(crate) struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    hidden: Linear,
    output: Linear,
}

impl Subject for Cnn {
    type Input = Tensor<4>;

    const BATCH: usize = 64;

    fn new(device: &Device) -> Self {
        let convolution = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            first: convolution([1, 16]),
            second: convolution([16, 32]),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            hidden: LinearConfig::new(32 * 7 * 7, 128).init(device),
            output: LinearConfig::new(128, 10).init(device),
        }
    }

    fn data(samples: usize, device: &Device) -> Batch<Self> {
        (normal([samples, 1, 28, 28], device), classes([samples, 1], 10, device))
    }

    fn cast(inputs: Tensor<4>, dtype: DType) -> Tensor<4> {
        inputs.cast(dtype)
    }

    fn flops() -> f64 {
        // Weights over the padding do not count: an axis has 3 * 28 - 2 pairs of weight and input.
        let first = 82 * 82 * 16;
        let others = 40 * 40 * 16 * 32 + 32 * 7 * 7 * 128 + 128 * 10;
        (2 * Self::BATCH * (2 * first + 3 * others)) as f64
    }

    fn logits(&self, inputs: Tensor<4>) -> Tensor<2> {
        let half = self.first.forward_pooled(inputs, Activation::Relu, &self.pool);
        let quarter = self.second.forward_pooled(half, Activation::Relu, &self.pool);
        let hidden = self.hidden.forward_fused(quarter.flatten(1, 3), Activation::Relu);
        self.output.forward_fused(hidden, Activation::Identity)
    }
}

/// Number of distinct tokens.
const VOCABULARY: usize = 65;
/// Constant of layer normalizations, the default of burn and PyTorch.
const EPSILON: f64 = 1e-5;

/// Size of a causal language model.
struct GptSize {
    width: usize,
    heads: usize,
    layers: usize,
    /// Number of tokens in a sample.
    sequence: usize,
    batch: usize,
}

const GPT: GptSize = GptSize { width: 128, heads: 4, layers: 2, sequence: 64, batch: 16 };
const GPT_768: GptSize = GptSize { width: 768, heads: 12, layers: 12, sequence: 256, batch: 16 };

impl GptSize {
    fn data(&self, samples: usize, device: &Device) -> Batch<Gpt> {
        let tokens = || classes([samples, self.sequence], VOCABULARY, device);
        (tokens(), tokens())
    }

    fn flops(&self) -> f64 {
        let linear = 12 * self.width * self.width;
        // A token reads the keys and values of itself and of those before it.
        let attention = 2 * self.width * (self.sequence + 1) / 2;
        let num_tokens = self.batch * self.sequence;
        let per_token = self.layers * (linear + attention) + self.width * VOCABULARY;
        (2 * num_tokens * 3 * per_token) as f64
    }
}

/// Causal language model of pre-norm layers of burn's transformer, on sequences of 64 tokens, in
/// batches of 16. It has 2 layers with 4 heads and width 128.
#[derive(Debug, Module)]
pub(crate) struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    output: Linear,
}

impl Gpt {
    fn of_size(size: &GptSize, device: &Device) -> Self {
        let GptSize { width, heads, layers, sequence, .. } = *size;
        let layers = TransformerEncoderConfig::new(width, 4 * width, heads, layers)
            .with_dropout(0.0)
            .with_norm_first(true);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, width).init(device),
            positions: EmbeddingConfig::new(sequence, width).init(device),
            layers: layers.init(device),
            norm: LayerNormConfig::new(width).init(device),
            output: LinearConfig::new(width, VOCABULARY).init(device),
        }
    }
}

impl Subject for Gpt {
    type Input = Tensor<2, Int>;

    const BATCH: usize = GPT.batch;

    fn new(device: &Device) -> Self {
        Self::of_size(&GPT, device)
    }

    fn data(samples: usize, device: &Device) -> Batch<Self> {
        GPT.data(samples, device)
    }

    fn cast(inputs: Tensor<2, Int>, _: DType) -> Tensor<2, Int> {
        inputs
    }

    fn flops() -> f64 {
        GPT.flops()
    }

    fn logits(&self, inputs: Tensor<2, Int>) -> Tensor<2> {
        let ([samples, length], device) = (inputs.dims(), inputs.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze();
        let positions = self.positions.forward_fused(positions);
        let embedded = self.tokens.forward_fused(inputs) + positions;
        let encoded = self.layers.forward_fused(embedded, &AttentionMask::causal(), EPSILON);
        let encoded = self.norm.forward_fused(encoded, EPSILON);
        let logits = self.output.forward_fused(encoded, Activation::Identity);
        logits.reshape([samples * length, VOCABULARY])
    }
}

/// [`Gpt`] with 12 layers, 12 heads and width 768, the size of GPT-2's smallest model, on sequences
/// of 256 tokens.
#[derive(Debug, Module)]
pub(crate) struct Gpt768 {
    gpt: Gpt,
}

impl Subject for Gpt768 {
    type Input = Tensor<2, Int>;

    const BATCH: usize = GPT_768.batch;

    fn new(device: &Device) -> Self {
        Self { gpt: Gpt::of_size(&GPT_768, device) }
    }

    fn data(samples: usize, device: &Device) -> Batch<Self> {
        GPT_768.data(samples, device)
    }

    fn cast(inputs: Tensor<2, Int>, _: DType) -> Tensor<2, Int> {
        inputs
    }

    fn flops() -> f64 {
        GPT_768.flops()
    }

    fn logits(&self, inputs: Tensor<2, Int>) -> Tensor<2> {
        self.gpt.logits(inputs)
    }
}

fn normal<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn classes(shape: [usize; 2], num_classes: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::<2>::random(shape, Distribution::Uniform(0.0, num_classes as f64), device).int()
}
